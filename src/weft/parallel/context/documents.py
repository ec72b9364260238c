"""Owns which document each column of every rank belongs to, as each rank must know it to mask what it attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.core.sequence import zigzag


def of_each_rank(own_BS: Tensor, comm: Comm, axis: Axis) -> tuple[Tensor, ...]:
    """documents_BS of every rank's columns, by rank, from each one's own: a small gather."""
    return comm.all_gather(own_BS, axis, dim=1).chunk(comm.degree(axis), dim=1)


def cut(whole_BS: Tensor, degree: int) -> tuple[Tensor, ...]:
    """The same from the documents of whole sequences: nothing is sent."""
    length = whole_BS.shape[1]
    return tuple(
        torch.cat([whole_BS[:, span.start : span.stop] for span in zigzag(length, degree, index)], dim=1)
        for index in range(degree)
    )
