"""The mean of a loss over what counts on all ranks: sums and counts are added, and divided once."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis


def global_mean(comm: Comm, axis: Axis, total: Tensor, count: Tensor | float) -> Tensor:
    """The sum of `total` of all ranks over that of `count`, on every rank; every rank must call it.

    Its gradient is that of this rank's part times the number of ranks: averaged over the ranks, as
    the wrappers do, it is the gradient of the mean. 0 where nothing counts.
    """
    number = torch.as_tensor(count).detach().to(total.device)
    local = torch.stack([total.detach().double(), number.double()])
    sum_of_all, count_of_all = comm.all_reduce(local, axis).unbind()
    divisor = nonzero(count_of_all)
    own_part = total * (comm.degree(axis) / divisor).to(total.dtype)
    mean = (sum_of_all / divisor).to(total.dtype)
    return own_part - own_part.detach() + mean


def nonzero(count: Tensor) -> Tensor:
    """The count, or 1 where nothing counts: then what is divided by it is 0."""
    return torch.where(count == 0, torch.ones_like(count), count)
