"""Random state of rank threads: inside `own_generator` torch's default CPU generator is one of the calling thread alone.

Note [Generators of rank threads]
    torch has one default CPU generator for a process, and `torch.manual_seed` in one thread seeds
    it for all. Ranks that are processes have one each; ranks that are threads get one each here.
    Whatever draws from the default generator passes one of two places:

        draws      operators whose schema has an argument `generator` or the tag of a seed. Kernels
                   on a dispatch key of its own, which only rank threads include, pass the
                   generator of their thread wherever the default one was meant. Operators without
                   the argument (`torch.randn`, dropout) call one that has it on what they fill.
                   Under a dispatch mode and on tensor subclasses they would call it out of reach
                   of the key: there the default generator takes the state of the thread's for as
                   long as the operator runs, for one thread at a time.
        state      `torch.manual_seed`, `seed`, `initial_seed`, `get_rng_state`, `set_rng_state`
                   and `fork_rng` call methods of `torch.random.default_generator`, which becomes
                   an object that hands them on to the generator of the calling thread.

    Operators that draw nothing skip the key inside the dispatcher and cost the same as without it;
    threads that do not include it see no difference at all. A backward runs in the thread of its rank:
    Note [Backward in rank threads] in comm/threads.py. What is not redirected: methods called on
    the object `torch.default_generator` itself, threads that a rank starts, and the generators of
    GPUs, NumPy and Python's `random`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key that nothing in torch itself includes, above all backends, autograd and modes."""
DEFAULT: torch.Generator = torch._C.default_generator
PLAIN = (Tensor, nn.Parameter)
DRAW_INSIDE = ("dropout", "_attention", "lstm", "gru", "rnn_")
"""Parts of the names of operators that draw and have no overload with a generator."""
DRAWING = torch.library.Library("aten", "IMPL")
OTHERS = torch._C._dispatch_library("IMPL", "_", KEY)
"""These hold the kernels of operators that draw and of all others, which are dropped with them."""
SHOWING = torch.library.Library("weft_random", "DEF")
"""Kept, too: the compiler of torch 2.11 looks at each operator that has ever been defined."""

_own_generator: ContextVar[torch.Generator | None] = ContextVar("own_generator", default=None)
_install_lock = threading.Lock()
_swap_lock = threading.RLock()


@contextmanager
def own_generator(state: Tensor) -> Iterator[None]:
    """Inside the block this thread draws from a generator of its own, which starts in `state`.

    See Note [Generators of rank threads].
    """
    # ranks start at once, and kernels can be registered a single time
    with _install_lock:
        key = _install()
    generator = torch.Generator()
    generator.set_state(state)
    before = _own_generator.set(generator)
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        _own_generator.reset(before)


class _GeneratorOfThread:
    """Stands for torch's default CPU generator: every attribute is that of the calling thread's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own_generator.get() or DEFAULT, name)


@cache
def _install() -> Any:
    """Register the kernels and the object of the Note, once in a process; returns the dispatch key.

    They stay: a thread without a generator of its own reaches the default one through them.
    """
    key = torch._C._parse_dispatch_key(KEY)
    OTHERS.fallback_fallthrough()
    default = _as_kernels_see_it(DEFAULT)
    for op in _operators_that_draw():
        kernel = _drawing_kernel(op, torch._C._dispatch_keyset_full_after(KEY), default)
        DRAWING.impl(op, kernel, KEY, with_keyset=True)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)  # they have no fallback; those of compiled code draw nothing
    vars(torch.random)["default_generator"] = _GeneratorOfThread()
    return key


def _as_kernels_see_it(generator: torch.Generator) -> object:
    """The object that a kernel in Python gets for this generator: the same one as long as it lives,
    but not the one that was passed.
    """
    seen: list[object] = []
    SHOWING.define("show(Generator generator) -> ()")
    SHOWING.impl("show", seen.append, "CompositeExplicitAutograd")
    torch.ops.weft_random.show(generator)
    return seen[0]


def _operators_that_draw() -> Iterator[OpOverload[..., Any]]:
    """The operators of torch that draw random numbers, themselves or through others."""
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("aten::")]
    drawing = {each.name for each in schemas if any(a.name == "generator" for a in each.arguments)}
    for schema in schemas:
        if schema.name in drawing or any(word in schema.name for word in DRAW_INSIDE):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            yield getattr(packet, schema.overload_name or "default")


def _generator_place(op: OpOverload[..., Any]) -> int | None:
    """The place of the argument `generator` in the schema."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index("generator") if "generator" in names else None


def _drawing_kernel(op: OpOverload[..., Any], below: Any, default: object) -> Callable[..., Any]:
    """`op`, drawing from the generator of the calling thread instead of the default one.

    Args:
        below: the dispatch keys of what `op` did without this kernel.
        default: what this kernel gets for the default generator where it is passed by name.
    """
    place = _generator_place(op)

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = _own_generator.get()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if own is None:
            return op.redispatch(keys & below, *args, **kwargs)
        if torch._C._len_torch_dispatch_stack() or not all(type(x) in PLAIN for x in tensors):
            with _default_in_state_of(own):
                return op.redispatch(keys & below, *args, **kwargs)
        if place is not None and tensors and tensors[0].device.type == "cpu":
            given = args[place] if len(args) > place else kwargs.get("generator")
            if given is None or given is default:
                if len(args) > place:
                    args = (*args[:place], own, *args[place + 1 :])
                else:
                    kwargs["generator"] = own
        return op.redispatch(keys & below, *args, **kwargs)

    return draw


@contextmanager
def _default_in_state_of(own: torch.Generator) -> Iterator[None]:
    """Inside the block the default generator continues the draws of this thread's."""
    with _swap_lock:
        before = DEFAULT.get_state()
        DEFAULT.set_state(own.get_state())
        token = _own_generator.set(None)  # what is called inside draws from the default one
        try:
            yield
        finally:
            _own_generator.reset(token)
            # also after an error: what was drawn before it is drawn in a process, too
            own.set_state(DEFAULT.get_state())
            DEFAULT.set_state(before)
