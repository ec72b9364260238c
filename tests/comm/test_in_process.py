"""Reductions of two tensors: the same bits in either order, in place or not."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from weft.comm.backends import reduce_in_order, reduce_into
from weft.comm.transport import Reduce

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
NEAR_FLOAT16_MAX = 6e4
"""The sum of two of them overflows float16, their mean does not."""


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", get_args(Reduce))
def test_a_reduction_in_place_has_the_bits_of_reduce_in_order_in_both_orders(
    op: Reduce, dtype: torch.dtype
) -> None:
    if op == "avg" and not dtype.is_floating_point:
        return
    generator = torch.Generator().manual_seed(3)
    random = (200 * torch.rand(2, 1000, generator=generator)).to(dtype)
    largest = torch.tensor([NEAR_FLOAT16_MAX]).to(dtype)
    first = torch.cat((random[0], largest))
    second = torch.cat((random[1], largest))

    forward = reduce_in_order((first, second), op)
    backward = reduce_in_order((second, first), op)
    total = first.clone()
    reduce_into(total, (total, second), op)

    assert torch.equal(bits(total), bits(forward))
    assert torch.equal(bits(forward), bits(backward))
