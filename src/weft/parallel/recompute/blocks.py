"""Blocks whose activations are recomputed: what is saved between forward and backward, by `parallel.recompute`.

none        everything that autograd saves
offload     everything, large tensors on the host: recompute/offload.py
selective   results that are cheap to recompute from what is saved anyway are not saved: recompute/selective.py
full        the block's input alone; its forward is recomputed
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft.layout.recomputation import RecomputeMode
from weft.models.common.batch import Batch
from weft.parallel.autograd.split_backward import active_split_backward
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.recompute.offload import HostCopying, OffloadChain
from weft.parallel.recompute.selective import SelectiveRecompute


def recompute_blocks(
    blocks: Mapping[str, nn.Module],
    modes: Mapping[str, RecomputeMode],
    copying: HostCopying | None = None,
    *,
    compiled: Collection[str] = (),
) -> dict[str, nn.Module]:
    """The blocks of a stage, each with its mode of recomputation.

    Args:
        copying: of offloaded blocks; None: their saved tensors stay where they are.
        compiled: those that recompute selectively by themselves, and repeat a forward as a whole.
    """
    chain = None if copying is None else OffloadChain(copying)
    found: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        if modes[name] == "offload" and chain is not None:
            found[name] = OffloadedBlock(block, chain)
        elif modes[name] == "full":
            found[name] = RecomputedBlock(block, "full", repeats_all=name in compiled)
        elif modes[name] == "selective" and name not in compiled:
            found[name] = RecomputedBlock(block, "selective")
        else:
            found[name] = block
    return found


class OffloadedBlock(nn.Module):
    """A block whose saved tensors are on the host between its forward and its backward."""

    def __init__(self, block: nn.Module, chain: OffloadChain) -> None:
        super().__init__()
        self.block = block
        self.chain = chain
        self.number = chain.add_block()

    def forward(self, x: Tensor, batch: Batch) -> Any:
        """The block's own forward."""
        if not torch.is_grad_enabled():
            return self.block(x, batch)
        call = self.chain.begin(self.block, number=self.number)
        return call.run(lambda: self.block(x, batch))


class RecomputedBlock(nn.Module):
    """A block that saves less of its forward.

    Attributes:
        repeats_all: whether full recomputation repeats the forward to its end.
    """

    def __init__(self, block: nn.Module, mode: RecomputeMode, *, repeats_all: bool = False) -> None:
        super().__init__()
        self.block = block
        self.mode = mode
        self.repeats_all = repeats_all

    def forward(self, x: Tensor, batch: Batch) -> Any:
        """The block's own forward."""
        if not torch.is_grad_enabled():
            return self.block(x, batch)
        if self.mode == "full":
            call = partial(self.block, x, batch)
            recompute = FullRecompute(call, repeats_all=self.repeats_all)
            return recompute.run()
        with SelectiveRecompute():
            return self.block(x, batch)


class RecomputedSlot:
    """What autograd saves in place of a tensor of a recomputed call; it is freed with the node that
    needs the tensor.
    """

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Tensor | None = None


class _AllRecomputedError(Exception):
    """The last tensor that is needed has been recomputed."""


class FullRecompute:
    """A call of which autograd saves nothing; it is repeated when a backward needs the first of
    what it would have saved.

        forward     call ── tensor 0, 1, 2 ...: a slot each          the tensors are freed
        backward    slot 2 is needed: the call again, until every slot that is still needed has its tensor

    Note [Why not torch.utils.checkpoint]
        The same idea (saved-tensor hooks; the repeated call stops at the last tensor that is
        needed, so a collective at the end of a block does not run again). But that one imports
        torch._dynamo when it is first called: 829 modules, a second and 70 MB a rank. And it
        repeats the call once for each run of the autograd engine, where a split backward is
        two: here a recomputed tensor stays until the node that needs it has run.

    Dropout is by counter, so no generator is restored. The call must do the same when it is
    repeated.

    Args:
        repeats_all: whether the call is repeated to its end, and before anything else of its backward, as
            of compiled code. That cannot be left half-way; and it asks for what it has saved at the begin
            of its backward if it has saved something, which of tensor-parallel ranks that count different
            losses some have and others have not: their collectives would be in another order. The meta
            device, where nothing is compiled, does the same.
    """

    def __init__(self, call: Callable[[], Any], *, repeats_all: bool = False) -> None:
        self._call = call
        self._repeats_all = repeats_all
        # Noted in the forward: when the call is repeated, in a backward, the mode is not active.
        self._split = active_split_backward()
        self._slots: list[weakref.ref[RecomputedSlot]] = []

    def run(self) -> Any:
        """Make the call, saving nothing."""
        with saved_tensors_hooks(self._pack, self._unpack):
            result = self._call()
        if self._repeats_all:
            nodes = {tensor.grad_fn for tensor in tensors_in(result)}
            # Any of the outputs may be the first to get its gradient; the other hooks then find all slots filled.
            for node in nodes:
                if node is not None:
                    node.register_prehook(self._before_backward)
        return result

    def _before_backward(self, _: object) -> None:
        slots = [reference() for reference in self._slots]
        if any(slot is not None and slot.value is None for slot in slots):
            self._recompute()

    def _pack(self, _: Tensor) -> RecomputedSlot:
        slot = RecomputedSlot()
        # The node of autograd owns the slot: once it is freed, nothing needs the tensor, and the
        # repeated call does not keep it.
        self._slots.append(weakref.ref(slot))
        return slot

    def _unpack(self, slot: RecomputedSlot) -> Tensor:
        if slot.value is None:
            self._recompute()
        assert slot.value is not None, (
            "a block saved fewer tensors when its forward was recomputed: it is not a function of its input"
        )
        return slot.value

    def _recompute(self) -> None:
        """Repeat the call and fill the slots that are still needed."""
        slots = [reference() for reference in self._slots]
        last_needed = max(place for place, slot in enumerate(slots) if slot is not None)
        num_saved = 0

        def fill_slot(tensor: Tensor) -> Tensor:
            nonlocal num_saved
            slot = slots[num_saved] if num_saved <= last_needed else None
            if slot is not None:
                # Without its graph, which would hold all that the repeated call has saved.
                slot.value = tensor.detach()
            if num_saved == last_needed and not self._repeats_all:
                raise _AllRecomputedError
            num_saved += 1
            return tensor.detach()

        hooks = saved_tensors_hooks(fill_slot, lambda tensor: tensor)
        try:
            # A backward runs with gradients off; autograd would then save nothing, and no hook be called.
            with torch.enable_grad(), self._split or nullcontext(), hooks:
                self._call()
        except _AllRecomputedError:
            return
