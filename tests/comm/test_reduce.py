"""Two pieces: the same bits, whichever stands first and whether the sum is made in place."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from weft.comm.reduce import combine, fold
from weft.comm.transport import Reduce

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", get_args(Reduce))
def test_a_reduction_of_two_in_place_has_the_bits_of_both_orders(op: Reduce, dtype: torch.dtype) -> None:
    if op == "avg" and not dtype.is_floating_point:
        return
    generator = torch.Generator().manual_seed(3)
    first, second = ((200 * torch.rand(2, 1000, generator=generator)).to(dtype)).unbind(0)
    largest = torch.tensor([6e4], dtype=torch.float32).to(dtype)  # their sum overflows float16, their mean does not
    first, second = torch.cat((first, largest)), torch.cat((second, largest))
    forward, backward, total = combine((first, second), op), combine((second, first), op), first.clone()
    fold(total, second, op)
    assert torch.equal(total.view(torch.uint8), forward.view(torch.uint8))
    assert torch.equal(forward.view(torch.uint8), backward.view(torch.uint8))
