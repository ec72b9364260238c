"""Owns promises: calls that are made again when autograd asks for what it would have saved of them. See Note [Promises]."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.parallel.model.tree import map_leaves, tensors_in


class Slot:
    """What autograd holds in place of a tensor; it dies with the node that needs it."""

    __slots__ = ("__weakref__", "promise", "value")

    def __init__(self, promise: Promise) -> None:
        self.promise: Promise | None = promise
        self.value: Tensor | None = None

    def fill(self, value: Tensor) -> None:
        """Hold the tensor, and no longer what it was made of."""
        self.value, self.promise = value.detach(), None

    def get(self) -> Tensor:
        """The tensor; it is made now if need be."""
        if self.promise is not None:
            self.promise.result()
        assert self.value is not None, "a call made again saves what it saved the first time"
        return self.value


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept, and its version when it was put here."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> Kept:
        """The tensor without its history, which would keep itself alive."""
        return Kept(tensor.detach(), tensor._version)

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written into since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that the backward needs was changed in place after the forward had used it")
        return self.tensor


@dataclass(frozen=True)
class Place:
    """How a tensor lies in the memory of a result."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, result: Tensor) -> Tensor:
        """The same view of the result made again."""
        return result.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class View:
    """A tensor that lies in the memory of a promised result."""

    promise: Promise
    place: Place

    def get(self) -> Tensor:
        """The tensor, made again."""
        return self.place.of(self.promise.result())


@dataclass(frozen=True)
class Argument:
    """A tensor that a promised call was given: kept, or promised itself."""

    source: Kept | View
    requires_grad: bool

    def get(self) -> Tensor:
        """The tensor, a leaf."""
        return self.source.get().detach().requires_grad_(self.requires_grad)


@dataclass(eq=False)
class Promise:
    """A call that is made again when what it yields, or what it keeps inside, is asked for.

    Attributes:
        args, kwargs: with an Argument in place of each tensor.
        inside: slots of what autograd saves within the call, in order.
        outside: slots of views of the result that others save. (A Place, no View: that would hold the promise for ever.)
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inside: list[weakref.ref[Slot]] = field(default_factory=list)
    outside: list[tuple[weakref.ref[Slot], Place]] = field(default_factory=list)

    def slot(self, place: Place) -> Slot:
        """For a view of the result."""
        slot = Slot(self)
        self.outside.append((weakref.ref(slot), place))
        return slot

    def slot_inside(self) -> Slot:
        """For the next tensor that is saved within the call."""
        slot = Slot(self)
        self.inside.append(weakref.ref(slot))
        return slot

    def result(self) -> Tensor:
        """Make the call again and fill all slots that are still waited for."""
        args, kwargs = map_leaves(self.args, Argument, Argument.get), map_leaves(self.kwargs, Argument, Argument.get)
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        inside = iter(self.inside)

        def keep(tensor: Tensor) -> Tensor:
            if memory_of(tensor) not in given and (slot := next(inside, _no_slot)()) is not None:
                slot.fill(tensor)
            return tensor.detach()

        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            result: Tensor = self.func(*args, **kwargs).detach()
        for reference, place in self.outside:
            if (slot := reference()) is not None:
                slot.fill(place.of(result))
        return result


def _no_slot() -> None:
    """A reference to nothing."""


def memory_of(tensor: Tensor) -> int:
    """Which storage a tensor lies in; no two that are alive have the same."""
    return int(tensor.untyped_storage()._cdata)
