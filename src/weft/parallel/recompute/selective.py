"""Selective recomputation: norms, activation functions and products of their results are not saved but recomputed.

Note [Selective recomputation]
    `SelectiveRecompute` is a mode of torch that sees every call of a torch function. Where the
    result can be recomputed from tensors that autograd saves anyway, the call becomes a
    RecomputedTensor. Whenever autograd saves something that lies in the memory of its result (the
    result, any view of it), it gets a slot, filled when the backward needs it: the call is
    repeated, after the calls of those of its arguments that are recomputed themselves. Two kinds of
    calls are:

        those that save their inputs     norms, silu, gelu, x * y where both have gradients
        those that save nothing          casts, sums, cat, x * constant: where what they are made of is recomputed

    In a layer of LLaMA:

                  x ── norm ── q k v ── rope ── attention ── o ── + ── norm ── gate, up ── silu(gate) * up ── down
    saved         x            v     q,k        out, lse          +            gate, up
    recomputed         norm                                            norm              silu(gate), product

    Matrix products, attention and collectives are never repeated; what a norm that torch composes
    of smaller calls saves inside is recomputed too. Rope gains nothing: the rotated q is saved in
    place of q, which no node needs.

    The mode works on any torch code, so models and users' modules say nothing of recomputation.
    Calls of `torch.utils.checkpoint` around norms and activations would save the same, but would
    have to be written into every model, and again for a product whose factors both come from such
    calls.
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

from weft.models.common.dropout import drop
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.recompute.recomputed_tensor import (
    CallArgument,
    RecomputedTensor,
    ResultView,
    SavedTensor,
    SavedTensorSlot,
    ViewSpec,
    memory_of,
)

SAVE_INPUTS: frozenset[Callable[..., Any]] = frozenset(
    {F.silu, F.gelu, F.rms_norm, F.layer_norm, torch.rms_norm}
)
"""Functions whose backward reads their first argument."""

ELEMENTWISE_PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.mul, Tensor.mul})
"""Functions whose backward reads each factor for the gradient of the other."""

SAVE_NOTHING: frozenset[Callable[..., Any]] = frozenset(
    {
        *ELEMENTWISE_PRODUCTS, torch.add, Tensor.add, torch.sub, Tensor.sub, torch.neg, Tensor.neg, torch.cat, torch.stack, F.pad,
        Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.contiguous, Tensor.clone,
        drop,
    }
)  # fmt: skip
"""Functions whose backward reads at most constants."""


@dataclass(frozen=True)
class _CheapResult:
    """A recomputed result, held until the block has run, so that its memory is not used for another
    tensor.
    """

    source: RecomputedTensor
    result: Tensor
    version: int


class SelectiveRecompute(TorchFunctionMode):
    """The forward of a block that does not save cheap results. See Note [Selective recomputation]."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[int, _CheapResult] = {}
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SelectiveRecompute:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._results.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `func`, for every function of torch."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not self._is_cheap(func, args, kwargs):
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if not any(tensor.requires_grad for tensor in tensors):
            # The second part of a split backward may need such a result when the frozen parameters that it is made of
            # have been resharded.
            return func(*args, **kwargs)
        return self._run_cheap(func, args, kwargs)

    def _run_cheap(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `func`, with slots in place of what autograd saves of it."""
        inputs = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        recomputed = RecomputedTensor(
            func,
            map_leaves(args, Tensor, self._call_argument),
            map_leaves(kwargs, Tensor, self._call_argument),
        )

        def pack(tensor: Tensor) -> SavedTensorSlot | SavedTensor:
            is_input = memory_of(tensor) in inputs
            return self._pack(tensor) if is_input else recomputed.add_inner_slot()

        # Innermost hooks are the ones that autograd calls: for this call they replace those of the block.
        with saved_tensors_hooks(pack, _unpack):
            result = func(*args, **kwargs)
        # Results are found again by their memory. A cast to the same type returns its argument, whose
        # memory belongs to another call or to none.
        if memory_of(result) not in inputs and _is_dense(result):
            self._results[memory_of(result)] = _CheapResult(recomputed, result, result._version)
        return result

    def _is_cheap(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if func in SAVE_INPUTS:
            is_in_place = kwargs.get("inplace") or (func is F.silu and True in args[1:])
            return not is_in_place
        if func not in SAVE_NOTHING or "out" in kwargs:
            return False
        with_gradients = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if func in ELEMENTWISE_PRODUCTS and len(with_gradients) == 2:
            return True
        for tensor in with_gradients:
            if self._result_view(tensor) is None:
                return False
        return bool(with_gradients)

    def _call_argument(self, tensor: Tensor) -> CallArgument:
        source = self._result_view(tensor) or SavedTensor.of(tensor)
        return CallArgument(source, tensor.requires_grad)

    def _pack(self, tensor: Tensor) -> SavedTensorSlot | SavedTensor:
        view = self._result_view(tensor)
        if view is None:
            return SavedTensor.of(tensor)
        return view.source.add_result_slot(view.spec)

    def _result_view(self, tensor: Tensor) -> ResultView | None:
        """The tensor as a view of a recomputed result, if it is one and the result was not modified
        in place.
        """
        cheap = self._results.get(memory_of(tensor))
        if cheap is None:
            return None
        is_modified = tensor._version != cheap.version
        if is_modified or tensor.dtype != cheap.result.dtype:
            return None
        return ResultView(cheap.source, ViewSpec.of(tensor))


def _unpack(packed: SavedTensorSlot | SavedTensor) -> Tensor:
    return packed.get()


def _is_dense(result: Tensor) -> bool:
    """Whether a result fills its memory from the start: then each view of it is a view of the
    recomputed one.
    """
    num_bytes = result.numel() * result.element_size()
    storage = result.untyped_storage()
    starts_at_0 = result.storage_offset() == 0
    return starts_at_0 and storage.nbytes() == num_bytes
