"""Owns results that are not kept because making them again is cheap: norms, activation functions, products of their results.

Note [Promises]
    `Thrift` is a mode of torch that sees every call of a torch function. Where the result can be had again from tensors
    that autograd keeps anyway, the call is noted as a promise. Whenever autograd saves something that lies in a promised
    result's memory (the result, any view of it), it gets a slot in its place, filled when the backward asks: the call is
    made again, its arguments first where they are promises themselves. Two kinds of calls are promises:

        those that keep their inputs     norms, silu, gelu, x * y where both have gradients
        those that keep nothing          casts, sums, cat, x * constant: where what they are made of is promised

    In a layer of LLaMA:   x ── norm ── q k v ── rope ── attention ── o ── + ── norm ── gate, up ── silu(gate) * up ── down
    kept                   x            v     q,k        out, lse          +            gate, up
    promised                    norm                                             norm             silu(gate), product

    Matrix products, attention and everything between ranks are never made again; what a norm that torch composes of
    smaller calls keeps inside is promised too. Rope is no gain: the rotated q takes the place of q, which nobody keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from weft.parallel.tree import map_leaves, tensors_in

KEEP_INPUTS: frozenset[Callable[..., Any]] = frozenset({F.silu, F.gelu, F.rms_norm, F.layer_norm, torch.rms_norm})
"""Functions whose backward reads their first argument."""

PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.mul, Tensor.mul})
"""Functions whose backward reads each factor for the gradient of the other."""

KEEP_NOTHING: frozenset[Callable[..., Any]] = frozenset(
    {
        *PRODUCTS, torch.add, Tensor.add, torch.sub, Tensor.sub, torch.neg, Tensor.neg, torch.cat, torch.stack, F.pad,
        Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.contiguous, Tensor.clone,
    }
)  # fmt: skip
"""Functions whose backward reads at most constants."""


class Slot:
    """What autograd holds in place of a tensor; it dies with the node that needs it."""

    __slots__ = ("__weakref__", "promise", "value")

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self.value: Tensor | None = None


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
class View:
    """A tensor as it lies in the memory of a promised result."""

    promise: Promise
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    def of(self, result: Tensor) -> Tensor:
        """The same view of the result made again."""
        return result.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Argument:
    """A tensor that a promised call was given: kept, or promised itself."""

    source: Kept | View
    requires_grad: bool

    def get(self) -> Tensor:
        """The tensor, a leaf."""
        if isinstance(self.source, Kept):
            return self.source.get().detach().requires_grad_(self.requires_grad)
        promised = self.source.of(self.source.promise.result())
        return promised.detach().requires_grad_(self.requires_grad)


@dataclass(eq=False)
class Promise:
    """A call that is made again when what it yields, or what it keeps inside, is asked for.

    Attributes:
        args, kwargs: with an Argument in place of each tensor.
        inside: slots of what autograd saves within the call, in order.
        outside: slots of views of the result that others save.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inside: list[weakref.ref[Slot]] = field(default_factory=list)
    outside: list[tuple[weakref.ref[Slot], View]] = field(default_factory=list)

    def slot(self, view: View) -> Slot:
        """A place for a view of the result."""
        slot = Slot(self)
        self.outside.append((weakref.ref(slot), view))
        return slot

    def slot_inside(self) -> Slot:
        """A place for the next tensor that is saved within the call."""
        slot = Slot(self)
        self.inside.append(weakref.ref(slot))
        return slot

    def result(self) -> Tensor:
        """Make the call again and fill all slots that are still waited for."""
        args, kwargs = map_leaves(self.args, Argument, Argument.get), map_leaves(self.kwargs, Argument, Argument.get)
        given = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        inside = iter(self.inside)

        def keep(tensor: Tensor) -> Tensor:
            if _memory(tensor) not in given and (slot := next(inside, _no_slot)()) is not None:
                slot.value = tensor.detach()
            return tensor.detach()

        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            result: Tensor = self.func(*args, **kwargs).detach()
        for reference, view in self.outside:
            if (slot := reference()) is not None:
                slot.value = view.of(result)
        return result


@dataclass(frozen=True)
class _Made:
    """A promised result, held until the block is over, so that its memory is nobody else's."""

    promise: Promise
    result: Tensor
    version: int


class Thrift(TorchFunctionMode):
    """The forward of a block that keeps no cheap results. See Note [Promises]."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, _Made] = {}
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Thrift:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._made.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of `func`, for every function of torch."""
        kwargs = kwargs or {}
        if not (torch.is_grad_enabled() and self._is_cheap(func, args, kwargs)):
            return func(*args, **kwargs)
        given = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        promise = Promise(func, map_leaves(args, Tensor, self._argument), map_leaves(kwargs, Tensor, self._argument))

        def pack(tensor: Tensor) -> Slot | Kept:
            return self._pack(tensor) if _memory(tensor) in given else promise.slot_inside()

        with saved_tensors_hooks(pack, _unpack):
            result = func(*args, **kwargs)
        if _memory(result) not in given and _is_dense(result):
            self._made[_memory(result)] = _Made(promise, result, result._version)
        return result

    def _is_cheap(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func in KEEP_INPUTS:
            return not kwargs.get("inplace") and not (func is F.silu and True in args[1:])
        if func not in KEEP_NOTHING or "out" in kwargs:
            return False
        flowing = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if func in PRODUCTS and len(flowing) == 2:
            return True
        return bool(flowing) and all(self._view(tensor) is not None for tensor in flowing)

    def _argument(self, tensor: Tensor) -> Argument:
        return Argument(self._view(tensor) or Kept.of(tensor), tensor.requires_grad)

    def _pack(self, tensor: Tensor) -> Slot | Kept:
        view = self._view(tensor)
        return Kept.of(tensor) if view is None else view.promise.slot(view)

    def _view(self, tensor: Tensor) -> View | None:
        """How the tensor lies in a promised result, if it does and the result is as it was made."""
        made = self._made.get(_memory(tensor))
        if made is None or tensor._version != made.version or tensor.dtype != made.result.dtype:
            return None
        return View(made.promise, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.requires_grad)


def _no_slot() -> None:
    """A reference to nothing."""


def _unpack(packed: Slot | Kept) -> Tensor:
    if isinstance(packed, Kept):
        return packed.get()
    if packed.value is None:
        packed.promise.result()
    assert packed.value is not None, "a call made again saves what it saved the first time"
    return packed.value


def _memory(tensor: Tensor) -> int:
    """Which storage a tensor lies in; no two that are alive have the same."""
    return int(tensor.untyped_storage()._cdata)


def _is_dense(result: Tensor) -> bool:
    """Whether a result fills its memory from the start: then each view of it is found again in one made anew."""
    return result.storage_offset() == 0 and result.untyped_storage().nbytes() == result.numel() * result.element_size()
