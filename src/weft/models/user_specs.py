"""FLOPs and output shapes of the blocks of a user's model, measured on the meta device with two batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.batch import Batch, activation_of
from weft.models.common.dropout_mode import run_block
from weft.models.common.head_output import takes_token_losses
from weft.models.common.uncompiled import keep_compiler_unimported, uncompiled_mode


@dataclass(frozen=True)
class MeasuredBlock:
    """Output shape of a block and FLOPs; of several tensors their names (of a tuple "") and shapes, where
    a pipeline stage can send them.
    """

    shape: tuple[int, ...]
    flops: float
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()


@uncompiled_mode
class FlopCount(TorchDispatchMode):
    """Adds the FLOPs of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += float(count(*args, **(kwargs or {}), out_val=out))
        return out


def measure_blocks(
    blocks: Mapping[str, nn.Module], batch: Batch, *, name: str
) -> dict[str, MeasuredBlock]:
    """Run the chain on the meta device; output shape and FLOPs of each block.

    Raises:
        PlanError: a block's forward fails, or the cross entropy gets no logits.
    """
    keep_compiler_unimported()
    found: dict[str, MeasuredBlock] = {}
    x: Any = batch.inputs
    for block_name, block in blocks.items():
        if takes_token_losses(block):
            _check_logits(x, batch, name=name)
        counter = FlopCount()
        try:
            with torch.no_grad(), counter, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a dry run, about gradients and devices
                out = run_block(block_name, block, x, batch)
        except PlanError:
            raise  # it says what to change
        except Exception as error:
            fault = Fault(
                f"{name}: block {block_name!r}",
                f"its forward fails on the meta device: {type_and_message(error)}",
                fix="shapes must not depend on values; create tensors on x.device",
            )
            raise PlanError(fault) from error
        x = activation_of(out)
        shape: tuple[int, ...] = ()
        if isinstance(x, Tensor):
            shape = tuple(x.shape)
        found[block_name] = MeasuredBlock(shape, counter.total, _parts_of(x, len(batch.inputs)))
    return found


def _check_logits(x: Any, batch: Batch, *, name: str) -> None:
    """Reject outputs with the dims of the targets, which the cross entropy takes for losses of targets."""
    dims = batch.targets.dim() + 1
    if isinstance(x, Tensor) and x.dim() < dims:
        fault = Fault(
            f"{name}: the last output",
            "has no dim of classes, over which the cross entropy is computed",
            got=f"shape {list(x.shape)}",
            need=f"{dims} dims",
            fix="return logits, classes last; for another loss add a last block named loss",
        )
        raise PlanError(fault)


def _parts_of(out: Any, num: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each tensor of a tuple or dict; () of anything else, and of tensors whose first
    dim does not count samples or that are not of one floating-point type, which carries gradients.
    """
    if isinstance(out, dict):
        named = list(out.items())
    elif type(out) is tuple:
        named = [("", tensor) for tensor in out]
    else:
        return ()
    tensors = [tensor for _, tensor in named if isinstance(tensor, Tensor)]
    has_samples = all(tensor.dim() > 0 and len(tensor) == num for tensor in tensors)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(tensors) < len(named) or not has_samples or len(dtypes) != 1:
        return ()
    has_names = type(out) is tuple or all(isinstance(name, str) and name for name, _ in named)
    if not tensors[0].is_floating_point() or not has_names:
        return ()
    return tuple((name, tuple(tensor.shape)) for name, tensor in named)


def output_dims(
    first: Sequence[int], second: Sequence[int], *, lengths: tuple[int, int]
) -> tuple[str | int, ...]:
    """The shape that a block hands on: dims that change with the batch and its length are named."""
    first_length, second_length = lengths
    dims: list[str | int] = []
    for place, sizes in enumerate(zip(first, second, strict=False)):
        is_batch = place == 0 and sizes == (2, 3)
        is_length = sizes == lengths
        is_seq = is_length and (place == 1 or first_length != second_length)
        if is_batch:
            dims.append("batch")
        elif is_seq:
            dims.append("seq")
        else:
            dims.append(int(sizes[0]))
    return tuple(dims)
