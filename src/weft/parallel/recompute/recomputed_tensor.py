"""Saved tensors that are recomputed by repeating a call. See Note [Selective recomputation].

autograd saves             it holds            when the backward needs it
the result, a view of it   SavedTensorSlot ──> RecomputedTensor.result(): repeats func(*args, **kwargs), fills all slots
a tensor inside the call   SavedTensorSlot ──┘        │
                                                      └─ args: CallArgument ── SavedTensor, or a ResultView of another
anything else              SavedTensor                                          RecomputedTensor, which is repeated first
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.parallel.autograd.tree import map_leaves, tensors_in


class SavedTensorSlot:
    """What autograd saves in place of a tensor; it is freed with the node that needs the tensor."""

    __slots__ = ("__weakref__", "source", "value")

    def __init__(self, source: RecomputedTensor) -> None:
        self.source: RecomputedTensor | None = source
        self.value: Tensor | None = None

    def fill(self, value: Tensor) -> None:
        """Hold the tensor, and no longer what it is recomputed from."""
        self.value = value.detach()
        self.source = None

    def get(self) -> Tensor:
        """The tensor, recomputed if it has not been."""
        if self.source is not None:
            self.source.result()
        assert self.value is not None, "a repeated call saves what it saved the first time"
        return self.value


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor and its version at that time."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> SavedTensor:
        """The tensor without its graph, which would keep itself alive."""
        return SavedTensor(tensor.detach(), tensor._version)

    def get(self) -> Tensor:
        """The tensor, as it was when it was saved.

        Raises:
            RuntimeError: it was modified in place since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after the forward had used it"
            )
        return self.tensor


@dataclass(frozen=True)
class ViewSpec:
    """Shape, strides and offset of a view of a result."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> ViewSpec:
        """The place of a tensor in its memory."""
        return ViewSpec(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view_of(self, result: Tensor) -> Tensor:
        """The same view of the recomputed result."""
        return result.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class ResultView:
    """A tensor that lies in the memory of a recomputed result."""

    source: RecomputedTensor
    spec: ViewSpec

    def get(self) -> Tensor:
        """The tensor, recomputed."""
        return self.spec.view_of(self.source.result())


@dataclass(frozen=True)
class CallArgument:
    """A tensor argument of a recomputed call: saved, or recomputed itself."""

    source: SavedTensor | ResultView
    requires_grad: bool

    def get(self) -> Tensor:
        """The tensor, as a leaf."""
        leaf = self.source.get().detach()
        # As in the forward: autograd saves the same tensors again only if the same arguments have gradients.
        return leaf.requires_grad_(self.requires_grad)


class ResultSlot(NamedTuple):
    """A slot of a view of a result. (A ResultView in place of the spec would keep the result's
    source alive.)
    """

    slot: weakref.ref[SavedTensorSlot]
    spec: ViewSpec


@dataclass(eq=False)
class RecomputedTensor:
    """The result of a call that is repeated when the result, or what autograd saves inside the
    call, is needed.

    Attributes:
        args, kwargs: with a CallArgument in place of each tensor.
        inner_slots: of what autograd saves within the call, in order.
        result_slots: of views of the result that autograd saves outside.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inner_slots: list[weakref.ref[SavedTensorSlot]] = field(default_factory=list)
    result_slots: list[ResultSlot] = field(default_factory=list)

    def add_result_slot(self, spec: ViewSpec) -> SavedTensorSlot:
        """A slot for a view of the result."""
        slot = SavedTensorSlot(self)
        result_slot = ResultSlot(weakref.ref(slot), spec)
        self.result_slots.append(result_slot)
        return slot

    def add_inner_slot(self) -> SavedTensorSlot:
        """A slot for the next tensor that is saved within the call."""
        slot = SavedTensorSlot(self)
        self.inner_slots.append(weakref.ref(slot))
        return slot

    def result(self) -> Tensor:
        """Repeat the call and fill all slots that are still needed."""
        args = map_leaves(self.args, CallArgument, CallArgument.get)
        kwargs = map_leaves(self.kwargs, CallArgument, CallArgument.get)
        inputs = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        # What autograd saves comes in the order of the first call, so slots are found by their place.
        # Arguments were packed as themselves then, and have none.
        references = iter(self.inner_slots)

        def fill_inner_slot(tensor: Tensor) -> Tensor:
            if memory_of(tensor) not in inputs:
                reference = next(references, None)
                slot = reference() if reference is not None else None
                if slot is not None:
                    slot.fill(tensor)
            return tensor.detach()

        hooks = saved_tensors_hooks(fill_inner_slot, lambda tensor: tensor)
        with torch.enable_grad(), hooks:
            # The graph of the repetition is dropped; the backward goes on through that of the first call.
            result: Tensor = self.func(*args, **kwargs).detach()
        for result_slot in self.result_slots:
            slot = result_slot.slot()
            if slot is not None:
                view = result_slot.spec.view_of(result)
                slot.fill(view)
        return result


def memory_of(tensor: Tensor) -> int:
    """Identity of the storage that a tensor lies in; no two that are alive have the same."""
    return int(tensor.untyped_storage()._cdata)
