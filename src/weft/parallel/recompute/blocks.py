"""Owns recomputation: a block keeps less between forward and backward and computes the rest again when the backward asks.

none        everything that autograd saves is kept
selective   results that are cheap to make again from what is kept anyway are not kept: parallel/cheap.py
full        nothing but the block's input is kept; its forward is played again
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft.layout.plan import Recompute
from weft.models.common.batch import Batch
from weft.parallel.pipeline.split_backward import active_split_backward
from weft.parallel.recompute.selective import SelectiveRecompute

ENDS = ("embed", "head", "loss")
"""Blocks whose results are used at once, or cost nothing to keep."""


def recompute_block(name: str, block: nn.Module, mode: Recompute) -> nn.Module:
    """The block as it is played under this mode."""
    return block if mode == "none" or name in ENDS else RecomputedBlock(block, _PLAYS[mode])


class RecomputedBlock(nn.Module):
    """A block that keeps less of its forward."""

    def __init__(self, block: nn.Module, play: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self.block, self._play = block, play

    def forward(self, x: Tensor, batch: Batch) -> Any:
        """What the block yields."""
        if not torch.is_grad_enabled():
            return self.block(x, batch)
        return self._play(lambda: self.block(x, batch))


class _Slot:
    """What autograd holds in place of a tensor; it dies with the node that needs it."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Tensor | None = None


class _EnoughError(Exception):
    """The last tensor that is needed has been made again."""


class FullRecompute:
    """A call of which autograd keeps nothing; it is made again when a backward asks for the first of what it would have kept.

    Note [Why not torch.utils.checkpoint]
        The same idea (saved-tensor hooks, the replay stops at the last tensor that is needed, so a collective at the end
        of a block does not run again). But that one imports torch._dynamo when it is first called: 829 modules, a second
        and 70 MB a rank. And it replays once for each run of the autograd engine, where a split backward is two: here a
        tensor that was made again stays until the node that needs it has run.

    No random numbers are drawn in weft's models, so none are restored. The call must do the same when it is made again.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._split = call, active_split_backward()
        self._slots: list[weakref.ref[_Slot]] = []

    def first(self) -> Any:
        """Make the call, keeping nothing."""
        with saved_tensors_hooks(self._put_off, self._bring_back):
            return self._call()

    def _put_off(self, _: Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        return slot

    def _bring_back(self, slot: _Slot) -> Tensor:
        if slot.value is None:
            self._again()
        assert slot.value is not None, (
            "a block made fewer tensors when it was played again: it is not a function of its input"
        )
        return slot.value

    def _again(self) -> None:
        waiting = [slot() for slot in self._slots]
        last = max(place for place, slot in enumerate(waiting) if slot is not None)
        made = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal made
            if (slot := waiting[made]) is not None:
                slot.value = tensor.detach()
            if made == last:
                raise _EnoughError
            made += 1
            return tensor.detach()

        try:
            with torch.enable_grad(), self._split or nullcontext(), saved_tensors_hooks(keep, lambda tensor: tensor):
                self._call()
        except _EnoughError:
            return


def _replayed(call: Callable[[], Any]) -> Any:
    return FullRecompute(call).first()


def _thrifty(call: Callable[[], Any]) -> Any:
    with SelectiveRecompute():
        return call()


_PLAYS: dict[Recompute, Callable[[Callable[[], Any]], Any]] = {"selective": _thrifty, "full": _replayed}
