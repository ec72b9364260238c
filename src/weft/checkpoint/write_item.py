"""Write items: the named pieces of tensors that one rank writes, and snapshots of them that training cannot change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from weft.checkpoint.format import DTYPES
from weft.checkpoint.host_copy import CopiesUnderWay, copy_to_host
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault

NO_DIGESTS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class WriteItem:
    """A piece of one stored tensor that this rank writes.

    Attributes:
        name: stored name: `model/layer0.attn.q.weight`, `optim/exp_avg/layer0.attn.q.weight`.
        shape: shape of the whole tensor.
        box: position of the piece in the whole tensor; an empty box only declares that the tensor
            exists.
        tensor: the entries, in the shape of the box.

    Raises:
        CheckpointError: name, shape, box, tensor or dtype are inconsistent.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault is not None:
            raise CheckpointError(fault)

    def _fault(self) -> Fault | None:
        parts = self.name.split("/")
        if len(parts) < 2 or not all(parts):
            return Fault(
                self.name, "is not a valid name of a stored tensor", need="section/parameter"
            )
        whole = Box.whole(self.shape)
        if len(self.box.lo) != len(self.shape) or self.box & whole != self.box:
            return Fault(
                self.name,
                "the piece lies outside its tensor",
                got=str(self.box),
                need=f"within {self.shape}",
            )
        tensor_shape = tuple(self.tensor.shape)
        if tensor_shape != self.box.shape:
            what = "the piece and its box have different shapes"
            return Fault(self.name, what, got=str(tensor_shape), need=str(self.box.shape))
        if dtype_name(self.tensor.dtype) not in DTYPES:
            return Fault(
                self.name,
                "this dtype cannot be stored",
                got=str(self.tensor.dtype),
                need=", ".join(DTYPES),
            )
        return None

    @property
    def num_bytes(self) -> int:
        """Size of the piece, bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Snapshot:
    """Copies of items on the CPU, which later training steps do not change.

    Attributes:
        items: with tensors that may be read after `under_way.wait()`.
        under_way: `under_way.before_change()` comes before the next update.
        digests: stored name -> digest of what this rank holds of it; read as the items' tensors.
    """

    items: tuple[WriteItem, ...]
    under_way: CopiesUnderWay
    digests: Mapping[str, Tensor]


def snapshot(items: Iterable[WriteItem], digests: Mapping[str, Tensor] = NO_DIGESTS) -> Snapshot:
    """Copy items and digests to the CPU; copies from GPUs go on beside the computation."""
    sources = tuple(items)
    copies = copy_to_host([*(item.tensor for item in sources), *digests.values()])
    copied = []
    for item, tensor in zip(sources, copies.tensors, strict=False):  # digests follow
        copied.append(replace(item, tensor=tensor))
    copied_digests = dict(zip(digests, copies.tensors[len(sources) :], strict=True))
    return Snapshot(tuple(copied), copies.under_way, copied_digests)
