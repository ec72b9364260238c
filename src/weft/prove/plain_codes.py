"""Optimizer states in 8 bits by definition, on whole parameters: what blocks are rounded to; not used in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEVER_NEGATIVE = ("exp_avg_sq",)
"""States whose codes have no sign."""
ROWS_AT_ONCE = 256


def rounded_to_8_bits(key: str, values: Tensor, length: int) -> Tensor:
    """States after they were stored: in every `length` entries of a row, the nearest multiple of
    their largest absolute value, by one of the numbers of `code_values`; the ratio is rounded to 11
    bits before, and a middle of two numbers to the smaller magnitude.
    """
    numbers = torch.tensor(code_values(has_sign=key not in NEVER_NEGATIVE), dtype=torch.float64)
    parts = [_nearest(part, numbers) for part in values.split(length, dim=-1)]
    return torch.cat(parts, dim=-1)


def code_values(*, has_sign: bool) -> list[float]:
    """The numbers that a code may mean, ascending: 64, 32, ... 1 of each power of ten below 1 (with
    their negatives and 0), or 128, 64, ... 2 of each, and 1e-7.
    """
    found = [0.0] if has_sign else [1e-7]
    for power in range(7):
        count = (64 if has_sign else 128) >> power
        found.extend((1 - 0.9 * number / count) * 10.0**-power for number in range(count))
    if has_sign:
        found.extend([-value for value in found if value])
    return sorted(found)


def decoded(codes: Tensor, largest: Tensor, length: int) -> Tensor:
    """The states that a checkpoint holds as codes, in float64.

    Args:
        largest: of each block of a row.
    """
    has_sign = codes.dtype == torch.int8
    numbers = torch.tensor(code_values(has_sign=has_sign), dtype=torch.float64)
    place = codes.long() + (127 if has_sign else 0)
    columns = [min(column // length, largest.shape[-1] - 1) for column in range(codes.shape[-1])]
    return numbers[place] * largest.double()[..., columns]


def _nearest(block: Tensor, numbers: Tensor) -> Tensor:
    largest = block.abs().amax(-1, keepdim=True).float().double()
    scale = largest.clamp(min=math.ulp(0.0))
    eleven_bits = (block.double() / scale * 2.0**15).half().double() / 2.0**15
    relative = eleven_bits.unsqueeze(-1)
    preference = 1e-9 * numbers.abs()
    found = [
        numbers[((numbers - rows).abs() + preference).argmin(-1)]
        for rows in relative.flatten(0, -3).split(ROWS_AT_ONCE)
    ]
    return (torch.cat(found).view(block.shape) * largest).to(block.dtype)
