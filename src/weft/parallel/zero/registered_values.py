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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node
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


class BlockValues:
    """The parameters of a block's own modules, which are registered unsharded between `expose` and `hide`; pairs
    of these may be nested.
    """

    def __init__(self, params: Iterable[RegisteredParam]) -> None:
        self._params = tuple(params)
        self._depth = 0

    @property
    def are_exposed(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self._depth > 0

    def expose(self) -> None:
        """Register the unsharded parameters."""
        self._depth += 1
        if self._depth == 1:
            self.register_unsharded()

    def hide(self) -> None:
        """Register the shards again; without effect where nothing is exposed, as after an error."""
        if self._depth == 1:
            self.hide_all()
        elif self._depth > 1:
            self._depth -= 1

    def hide_all(self) -> None:
        """The same, however often the parameters were exposed."""
        if self._depth > 0:
            self._depth = 0
            self.register_shards()

    def register_unsharded(self) -> None:
        for module, name, shard, unsharded in self._params:
            module.__dict__.pop(name, None)
            if module._parameters.get(name) is shard:
                module._parameters[name] = unsharded

    def register_shards(self) -> None:
        for module, name, shard, unsharded in self._params:
            if name in module._parameters:
                module.__dict__[name] = unsharded
                if module._parameters[name] is unsharded:
                    module._parameters[name] = shard


class RegisteredValues:
    """The parameters of all blocks of a wrapped module: those of a block are exposed in its forward, those of
    all blocks in each backward.
    """

    def __init__(self, chain: tuple[nn.Module, ...], shard_of: Mapping[int, nn.Parameter]) -> None:
        """To be called before shards are registered.

        Args:
            chain: the blocks.
            shard_of: id of an unsharded parameter -> its shard.
        """
        self._blocks = [
            BlockValues(
                RegisteredParam(module, name, shard_of[id(param)], param)
                for _, module in own_modules(block, chain)
                for name, param in module._parameters.items()
                if param is not None
            )
            for block in chain
        ]
        self._in_backward = False
        self._nodes: list[Node] | None = None

    def register_hooks(self, chain: tuple[nn.Module, ...]) -> list[RemovableHandle]:
        """Have the forwards of the blocks expose their parameters; to be called after all other hooks that are
        called before these forwards.
        """
        hooks: list[RemovableHandle] = []
        for block, values in zip(chain, self._blocks, strict=True):
            hooks.append(block.register_forward_pre_hook(_expose(values)))
            hooks.append(block.register_forward_hook(self._hide(values), always_call=True))
        return hooks

    def _hide(self, values: BlockValues) -> Callable[[nn.Module, Any, Any], None]:
        @not_compiled
        def hide(module: nn.Module, args: Any, out: Any) -> None:
            values.hide()
            if self._nodes is not None:
                # of the graph, which would not keep the outputs themselves
                self._nodes += [node for each in tensors_in(out) if (node := each.grad_fn)]

        return hide

    def begin_forward(self) -> None:
        """Note where the outputs of blocks come from until `end_forward`."""
        self._nodes = []

    def end_forward(self, *, is_seen: bool) -> None:
        """The forward of the whole module has ended.

        Args:
            is_seen: whether `begin_backward` will be called; else hooks on the outputs of blocks do so.
        """
        nodes = self._nodes or []
        self._nodes = None
        if not is_seen:
            begin = _begin_of(weakref.ref(self))
            for node in nodes:
                node.register_prehook(begin)

    def interrupt_forward(self) -> None:
        """It has raised an error: after `KeyboardInterrupt` torch calls no hook of its blocks."""
        self._nodes = None
        if not self._in_backward:
            for values in self._blocks:
                values.hide_all()

    def begin_backward(self) -> None:
        """A backward begins, in which a part of a block may be recomputed: expose all parameters until it ends."""
        self.hide_after_error()
        if not self._in_backward:
            self._in_backward = True
            for values in self._blocks:
                values.expose()
            after_this_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        for values in self._blocks:
            values.hide()

    def hide_after_error(self) -> None:
        """Register the shards where the last backward has raised an error, so that nothing was called at its end."""
        if self._in_backward and backward_id() == NO_BACKWARD:
            self._in_backward = False
            for values in self._blocks:
                values.hide_all()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Have the shards registered, also within a forward or a backward: a hook or a signal handler saves them."""
        self.hide_after_error()
        exposed = [values for values in self._blocks if values.are_exposed]
        for values in exposed:
            values.register_shards()
        try:
            yield
        finally:
            for values in exposed:
                values.register_unsharded()


def _expose(values: BlockValues) -> Callable[[nn.Module, Any], None]:
    @not_compiled
    def expose(module: nn.Module, args: Any) -> None:
        values.expose()

    return expose


def _begin_of(weak_values: weakref.ref[RegisteredValues]) -> Callable[[tuple[Tensor, ...]], None]:
    """Hook of an output, which holds no module: it lives as long as the graph."""

    def begin(gradients: tuple[Tensor, ...]) -> None:
        values = weak_values()
        if values is not None:
            values.begin_backward()

    return begin
