"""ZeRO-3 hooks: unshard before forward and backward, prefetch the next group, reshard after.

    forward     gather 0 ─ block 0 ──────── block 1 ──────── block 2 ...
                           gather 1 ──────┘ gather 2 ──────┘               prefetch of the next block
    backward    ... block 2 ──────── block 1 ──────── block 0
                    gather 1 ──────┘ gather 0 ──────┘                      prefetch of the previous block
                            reduce 2 ───────────────┘                      gradient_reducer.py, as gradients arrive

Note [When a group is resharded]
    A group stays unsharded while one of its blocks runs backward, also where a forward is
    recomputed meanwhile. In a backward it is resharded when its last gradient has arrived
    (gradient_reducer.py) and the gradients of its block's inputs have: a parameter that is frozen, or
    read detached, may be needed after its own. Of several inputs the one that was computed last decides,
    since its gradient comes first, and after all that the block computes; others, such as an embedding
    of time, go to many blocks. Where this does not happen (unused parameters, gradients that are
    computed later, inputs without gradients) a group is resharded at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.parallel.autograd.backward_end import NO_BACKWARD, after_this_backward, backward_id
from weft.parallel.autograd.not_compiled import not_compiled
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.recompute.recomputed_tensor import memory_of
from weft.parallel.zero.param_group import ParamGroup


@dataclass(frozen=True)
class BlockGroups:
    """A module and the parameter groups that its forward and backward use."""

    module: nn.Module
    groups: tuple[ParamGroup, ...]


def groups_of(
    params: Iterable[nn.Parameter], groups: Iterable[ParamGroup]
) -> tuple[ParamGroup, ...]:
    """Those of `groups` that hold one of `params` and are freed between uses, each once."""
    group_of_param: dict[int, ParamGroup] = {}
    for group in groups:
        if group.reshards:
            ids = map(id, group.params.values())
            group_of_param.update(dict.fromkeys(ids, group))
    found: dict[int, ParamGroup] = {}
    for param in params:
        holder = group_of_param.get(id(param))
        if holder is not None:
            found[id(holder)] = holder
    return tuple(found.values())


def register_unshard_hooks(chains: Sequence[Sequence[BlockGroups]]) -> list[RemovableHandle]:
    """Have modules unshard their groups. The modules of one chain run in order, so that neighbours
    prefetch for each other.
    """
    in_backward = GroupsInBackward()
    hooks: list[RemovableHandle] = []
    for chain in chains:
        groups_of_blocks = [block.groups for block in chain]
        next_groups = [*groups_of_blocks[1:], ()]
        previous_groups = [(), *groups_of_blocks[:-1]]
        for position, block in enumerate(chain):
            if not block.groups:
                continue
            schedule = PrefetchSchedule(
                block.groups,
                next_groups=next_groups[position],
                previous_groups=previous_groups[position],
                in_backward=in_backward,
            )
            hooks += [
                block.module.register_forward_pre_hook(
                    schedule.before_forward,
                    with_kwargs=True,
                    prepend=True,  # before hooks that compute a weight, such as nn.utils.weight_norm
                ),
                block.module.register_forward_hook(
                    schedule.copy_views,
                    prepend=True,  # before hooks that register others on the outputs
                ),
                block.module.register_forward_hook(schedule.after_forward),
            ]
    return hooks


class GroupsInBackward:
    """The groups of blocks whose backward has begun, until the whole backward ends; where it creates a
    graph (`create_graph=True`), until the backward of that graph ends, which needs them at its start.
    """

    def __init__(self) -> None:
        self._groups: dict[int, ParamGroup] = {}
        self._is_end_queued = False
        self._creates_graph = False

    def add(self, groups: Iterable[ParamGroup]) -> None:
        """Unshard these for the backward that is running."""
        if not self._is_end_queued:
            self._is_end_queued = True
            after_this_backward(self._on_backward_end)
        # With `create_graph` gradients are computed with gradients on, and a second backward reads
        # the same values.
        self._creates_graph |= torch.is_grad_enabled()
        for group in groups:
            self._groups[id(group)] = group
            group.unshard()

    def drop_interrupted(self) -> None:
        """Outside of a backward: end the last one, if it has raised an error."""
        if self._is_end_queued:
            self._creates_graph = False
            self._on_backward_end()

    def __contains__(self, group: ParamGroup) -> bool:
        return id(group) in self._groups

    def _on_backward_end(self) -> None:
        self._is_end_queued = False
        if self._creates_graph:
            self._creates_graph = False
            return
        for group in self._groups.values():
            group.reshard()
        self._groups.clear()


class BlockUse:
    """One call of a block: its backward begins at its outputs and ends at its inputs, where they have gradients.

    Attributes:
        groups: of the block.
    """

    def __init__(self, groups: Iterable[ParamGroup]) -> None:
        self.groups = tuple(groups)
        self._backward = NO_BACKWARD

    def end_at_gradient_of(self, inputs: Any) -> None:
        """Have the backward end once the input that was computed last has its gradient."""
        number_of = {
            tensor: tensor.grad_fn._sequence_nr()
            for tensor in tensors_in(inputs)
            if tensor.grad_fn is not None
        }
        if number_of:
            # Autograd numbers nodes in the order of the forward, and the backward runs the largest first.
            last = max(number_of, key=number_of.__getitem__)
            last.register_hook(self._end)

    def begin(self) -> None:
        """An output has its gradient."""
        if self._backward != backward_id():
            self._backward = backward_id()
            for group in self.groups:
                group.begin_backward()

    def _end(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            return  # a second backward reads the parameters, and frees them at its end
        for group in self.groups:
            group.end_backward()


@dataclass
class PrefetchSchedule:
    """The hooks of one block. See Note [When a group is resharded].

    Attributes:
        groups: of the block itself.
        next_groups: of the block after it, prefetched while it runs forward.
        previous_groups: of the block before it, prefetched while it runs backward.
    """

    groups: tuple[ParamGroup, ...]
    next_groups: tuple[ParamGroup, ...]
    previous_groups: tuple[ParamGroup, ...]
    in_backward: GroupsInBackward
    _call: BlockUse | None = None

    @not_compiled
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Unshard the block, prefetch the next."""
        # A recomputed forward runs inside of a backward, whose groups stay unsharded.
        if backward_id() == NO_BACKWARD:
            self.in_backward.drop_interrupted()
            for group in self.groups:
                group.drop_outdated()
        for group in self.groups:
            group.unshard()
        # A forward inside of a backward recomputes: the block that comes next there is the one
        # before, and its gather has begun already.
        is_recomputed = any(group in self.in_backward for group in self.groups)
        if not is_recomputed:
            for group in self.next_groups:
                group.start_unshard()
        # Handed to the hook behind the forward; an exception in between leaves it, and the next call replaces it.
        self._call = BlockUse(self.groups)
        if torch.is_grad_enabled():
            self._call.end_at_gradient_of((args, kwargs))

    @not_compiled
    def copy_views(self, module: nn.Module, args: Any, out: Any) -> Any:
        """Copy outputs that are parameters of the block or views of them: their memory is freed."""
        storages = {memory_of(group.flat) for group in self.groups if group.flat is not None}

        def is_view(tensor: Tensor) -> bool:
            return tensor.layout == torch.strided and memory_of(tensor) in storages

        def copied(tensor: Tensor) -> Tensor:
            return tensor.clone() if is_view(tensor) else tensor

        if any(map(is_view, tensors_in(out))):
            return map_leaves(out, Tensor, copied)
        return None

    @not_compiled
    def after_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        """Reshard the block; have its backward unshard it again."""
        for group in self.groups:
            # What the next block uses, too, stays; and so does what a running backward has
            # unsharded.
            is_next = any(group is other for other in self.next_groups)
            if not is_next and group not in self.in_backward:
                group.reshard()
        call = self._call
        self._call = None
        assert call is not None, "set before the forward"

        def before_backward(gradient: Tensor) -> None:
            self.in_backward.add(self.groups)
            call.begin()
            for group in self.previous_groups:
                group.start_unshard()

        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)
