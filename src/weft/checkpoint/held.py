"""Owns what a rank brings to a checkpoint: named pieces of tensors, and a snapshot of them that training cannot change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.checkpoint.format import DTYPES
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


@dataclass(frozen=True, eq=False)
class Held:
    """A piece of one stored tensor that this rank is to write.

    Attributes:
        name: as stored: `model/layer0.attn.q.weight`, `optim/exp_avg/layer0.attn.q.weight`.
        shape: of the whole tensor.
        box: where the piece belongs in it; may be empty: then the rank only says that there is such a tensor.
        tensor: the entries, in the shape of the box.

    Raises:
        CheckpointError: box, shape, tensor and type do not fit together.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    def __post_init__(self) -> None:
        if not all(self.name.split("/")) or "/" not in self.name:
            raise CheckpointError(Fault(self.name, "no name to store a tensor by", need="section/parameter"))
        whole = Box.whole(self.shape)
        if len(self.box.lo) != len(self.shape) or self.box & whole != self.box:
            raise CheckpointError(Fault(self.name, "a piece outside its tensor", str(self.box), f"within {self.shape}"))
        if tuple(self.tensor.shape) != self.box.shape:
            raise CheckpointError(
                Fault(self.name, "a piece in another shape than its box", str(self.tensor.shape), str(self.box.shape))
            )
        if dtype_name(self.tensor.dtype) not in DTYPES:
            raise CheckpointError(Fault(self.name, "no type to store", str(self.tensor.dtype), ", ".join(DTYPES)))

    @property
    def num_bytes(self) -> int:
        """Of the piece."""
        return self.tensor.numel() * self.tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def snapshot(held: Iterable[Held]) -> tuple[Held, ...]:
    """Copies on the CPU: what training does next does not reach them. Copies from a device overlap each other."""
    pieces = [(piece, _room_for(piece.tensor)) for piece in held]
    for piece, room in pieces:
        room.copy_(piece.tensor.detach(), non_blocking=True)
    for device in {piece.tensor.device for piece, _ in pieces if piece.tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return tuple(replace(piece, tensor=room) for piece, room in pieces)


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
