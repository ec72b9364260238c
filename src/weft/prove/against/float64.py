"""Modules of transformers in float64: the casts to float32 inside them become casts to float64; what is left is named.

Note [float32 in transformers]
    Norms and routers of transformers compute in float32 whatever the type of the model: rounding of
    1e-7, where a comparison in float64 sees 1e-16. Here they run the very code that transformers
    ships, in which the names `float32` and `float` mean float64. Tables of rotary angles keep their
    float32: positions times frequencies are rounded so by definition of these models, and weft
    rounds them alike. An operation that still makes float32 of float64 is found by looking at all
    operations of a forward; the modules that do so get noise of one unit of float32 in further runs
    of the reference, from which bounds are derived as in Note [Bounds].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDE_NAMES = {"float": "double", "float32": "float64"}
ROTARY = "RotaryEmbedding"
"""End of the names of classes that make tables of rotary angles, float32 by definition."""


def compute_in_float64(model: nn.Module) -> None:
    """Let all modules but rotary tables compute in float64 where their code names float32."""
    model.double()
    for module in model.modules():
        forward = type(module).forward
        is_rotary = type(module).__name__.endswith(ROTARY)
        if is_rotary or not isinstance(forward, FunctionType):
            continue
        if names_float32(forward.__code__):
            module.forward = MethodType(widened(forward), module)


def names_float32(code: CodeType) -> bool:
    """Whether a function names a type of 32 bits."""
    return not WIDE_NAMES.keys().isdisjoint(code.co_names)


def widened(function: FunctionType) -> FunctionType:
    """The very same code, in which float32 means float64: `torch.float32`, `torch.float` and
    `x.float()` alike.
    """
    code = function.__code__
    names = tuple(WIDE_NAMES.get(name, name) for name in code.co_names)
    wide = FunctionType(
        code.replace(co_names=names),
        {**function.__globals__, "double": float},  # the builtin, by its new name
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    wide.__kwdefaults__ = function.__kwdefaults__
    return wide


class _Float32Operations(TorchDispatchMode):
    """Notes the innermost module of each operation that makes float32 of float64."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_narrow = isinstance(out, Tensor) and out.dtype == torch.float32
        reads_wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
        if is_narrow and reads_wide and self.running:
            self.found[self.running[-1]] = None
        return out


def float32_modules(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Names of the modules, rotary tables aside, that still make float32 of float64.

    Args:
        run: a forward of the model.
    """
    running: list[str] = []
    handles = []
    rotary = set()
    for name, module in model.named_modules():
        if type(module).__name__.endswith(ROTARY):
            rotary.add(name)
        handles.append(module.register_forward_pre_hook(_entering(name, running)))
        handles.append(module.register_forward_hook(_leaving(running)))
    operations = _Float32Operations(running)
    with torch.no_grad(), operations:
        run()
    for handle in handles:
        handle.remove()
    return tuple(name for name in operations.found if name not in rotary)


def _entering(name: str, running: list[str]) -> Callable[..., None]:
    return lambda *args: running.append(name)


def _leaving(running: list[str]) -> Callable[..., None]:
    def leave(*args: object) -> None:
        running.pop()

    return leave


@contextmanager
def noise(modules: Iterable[nn.Module], *, eps: float, seed: int) -> Iterator[None]:
    """Multiply the outputs of modules by 1 plus or minus one unit of rounding inside the block."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(module: nn.Module, args: object, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        signs = torch.randint(-1, 2, output.shape, generator=generator)
        return output * (1 + eps * signs.to(output.dtype))

    handles = [module.register_forward_hook(perturb) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
