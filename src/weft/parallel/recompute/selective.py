"""Owns results that are not kept because making them again is cheap: norms, activation functions, products of their results.

Note [Promises]
    `SelectiveRecompute` is a mode of torch that sees every call of a torch function. Where the result can be had again from tensors
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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from weft.parallel.model.tree import map_leaves, tensors_in
from weft.parallel.recompute.recomputed_tensor import Argument, Kept, Place, Promise, Slot, View, memory_of

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


@dataclass(frozen=True)
class _Made:
    """A promised result, held until the block is over, so that its memory is nobody else's."""

    promise: Promise
    result: Tensor
    version: int


class SelectiveRecompute(TorchFunctionMode):
    """The forward of a block that keeps no cheap results. See Note [Promises]."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, _Made] = {}
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SelectiveRecompute:
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
        if not (torch.is_grad_enabled() and self._is_cheap(func, args, kwargs) and _flows((args, kwargs))):
            return func(*args, **kwargs)
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        promise = Promise(func, map_leaves(args, Tensor, self._argument), map_leaves(kwargs, Tensor, self._argument))

        def pack(tensor: Tensor) -> Slot | Kept:
            return self._pack(tensor) if memory_of(tensor) in given else promise.slot_inside()

        with saved_tensors_hooks(pack, _unpack):
            result = func(*args, **kwargs)
        if memory_of(result) not in given and _is_dense(result):
            self._made[memory_of(result)] = _Made(promise, result, result._version)
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
        return Kept.of(tensor) if view is None else view.promise.slot(view.place)

    def _view(self, tensor: Tensor) -> View | None:
        """How the tensor lies in a promised result, if it does and the result is as it was made."""
        made = self._made.get(memory_of(tensor))
        if made is None or tensor._version != made.version or tensor.dtype != made.result.dtype:
            return None
        return View(made.promise, Place(tensor.shape, tensor.stride(), int(tensor.storage_offset())))


def _unpack(packed: Slot | Kept) -> Tensor:
    return packed.get()


def _flows(given: Any) -> bool:
    """Whether the result has a gradient. One without is asked for late where a backward is split, in its second part, when
    the frozen parameters that it is made of have been given away."""
    return any(tensor.requires_grad for tensor in tensors_in(given))


def _is_dense(result: Tensor) -> bool:
    """Whether a result fills its memory from the start: then each view of it is found again in one made anew."""
    return result.storage_offset() == 0 and result.untyped_storage().nbytes() == result.numel() * result.element_size()
