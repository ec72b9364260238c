"""While a block computes, its modules have the unsharded parameters registered, so that `functional_call` replaces them.

Note [What a forward finds]
    Outside, `named_parameters()` has shards, and `module.weight` is the unsharded parameter by an attribute
    in the module's `__dict__`, which comes before what is registered (see Note [Two tensors for a parameter]).
    A forward may read `named_parameters()`, differentiate with regard to them, and call a module with others
    in their place, as `torch.func.functional_call` does by registering them. So inside of a block's forward,
    and of the backward, which may recompute a part of it, the unsharded parameters are registered, and the
    attributes are gone. What a script has registered in a shard's place, around the block, stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.parallel.autograd.backward_end import NO_BACKWARD, after_this_backward, backward_id
from weft.parallel.autograd.not_compiled import not_compiled
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.zero.meta_init import own_modules


class RegisteredParam(NamedTuple):
    """A parameter of a module: its shard, and the unsharded one, which the module computes with."""

    module: nn.Module
    name: str
    shard: nn.Parameter
    unsharded: nn.Parameter


class RegisteredValues:
    """The parameters of a block's own modules, which are registered unsharded between `expose` and `hide`; pairs
    of these may be nested.
    """

    def __init__(self, params: Iterable[RegisteredParam]) -> None:
        self._params = tuple(params)
        self._depth = 0
        self._in_backward = False

    def expose(self) -> None:
        """Register the unsharded parameters."""
        self._depth += 1
        if self._depth > 1:
            return
        for module, name, shard, unsharded in self._params:
            module.__dict__.pop(name, None)
            if module._parameters.get(name) is shard:
                module._parameters[name] = unsharded

    def hide(self) -> None:
        """Register the shards again; without effect where nothing is exposed, as after an error."""
        if self._depth == 1:
            self.hide_all()
        elif self._depth > 1:
            self._depth -= 1

    def hide_all(self) -> None:
        """The same, however often the parameters were exposed."""
        if self._depth == 0:
            return
        self._depth = 0
        for module, name, shard, unsharded in self._params:
            if name in module._parameters:
                module.__dict__[name] = unsharded
                if module._parameters[name] is unsharded:
                    module._parameters[name] = shard

    def hide_after_error(self) -> None:
        """Register the shards where the last backward has raised an error, so that nothing was called at its end."""
        if self._in_backward and backward_id() == NO_BACKWARD:
            self._in_backward = False
            self.hide_all()

    def register_hooks(self, block: nn.Module) -> list[RemovableHandle]:
        """Have the forward and the backward of a block expose them; to be called after all other hooks of the
        block that are called before its forward.
        """
        begin = _begin_of(weakref.ref(self))

        @not_compiled
        def before_forward(module: nn.Module, args: Any) -> None:
            self.expose()

        @not_compiled
        def after_forward(module: nn.Module, args: Any, out: Any) -> None:
            self.hide()
            for tensor in tensors_in(out):
                if tensor.requires_grad:
                    tensor.register_hook(begin)

        return [
            block.register_forward_pre_hook(before_forward),
            block.register_forward_hook(after_forward, always_call=True),
        ]

    def begin_backward(self) -> None:
        """An output of the block has its gradient: expose the parameters until the backward ends."""
        self.hide_after_error()
        if not self._in_backward:
            self._in_backward = True
            self.expose()
            after_this_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self.hide()


def _begin_of(weak_values: weakref.ref[RegisteredValues]) -> Callable[[Tensor], None]:
    """Hook of an output, which holds no module: it lives as long as the graph."""

    def begin(gradient: Tensor) -> None:
        values = weak_values()
        if values is not None:
            values.begin_backward()

    return begin


def values_of_blocks(
    chain: tuple[nn.Module, ...], shard_of: Mapping[int, nn.Parameter]
) -> list[RegisteredValues]:
    """Those of each block of a chain, in its order; to be called before shards are registered.

    Args:
        shard_of: id of an unsharded parameter -> its shard.
    """
    return [
        RegisteredValues(
            RegisteredParam(module, name, shard_of[id(param)], param)
            for _, module in own_modules(block, chain)
            for name, param in module._parameters.items()
            if param is not None
        )
        for block in chain
    ]
