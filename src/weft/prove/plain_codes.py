"""Optimizer states in 8 bits by definition, on whole parameters: what blocks are rounded to; not used in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEVER_NEGATIVE = ("exp_avg_sq",)
"""States whose codes have no sign."""


def rounded_to_8_bits(key: str, values: Tensor, length: int) -> Tensor:
    """States after they were stored: every `length` entries of a row are multiples of their largest
    absolute value, whose square roots are 127ths with a sign, or fourth roots 255ths above 0.
    """
    has_sign = key not in NEVER_NEGATIVE
    parts = [_rounded(part, has_sign=has_sign) for part in values.split(length, dim=-1)]
    return torch.cat(parts, dim=-1)


def code_values(*, has_sign: bool) -> list[float]:
    """The numbers that a code may mean, ascending."""
    if has_sign:
        return [math.copysign((code / 127) ** 2, code) for code in range(-127, 128)]
    return [(code / 255) ** 4 for code in range(256)]


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


def _rounded(block: Tensor, *, has_sign: bool) -> Tensor:
    largest = block.abs().amax(-1, keepdim=True).float().double()
    relative = block.double() / largest.where(largest > 0, 1.0)  # denormals may be flushed
    power, last = (2, 127) if has_sign else (4, 255)
    root = relative.abs() ** (1 / power)
    below = (root * last).floor()
    is_nearer_above = root - below / last > (below + 1) / last - root
    code = torch.where(is_nearer_above, below + 1, below)
    if not has_sign:
        code = code.clamp(min=1)
    sign = relative.sign() if has_sign else 1.0
    return (sign * (code / last) ** power * largest).to(block.dtype)
