"""NF4 by definition: a whole matrix rounded block by block to the published levels, without the code that packs bytes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from weft.core.model_config import ModelConfig, logical_axes
from weft.models import Family

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Dettmers et al. 2023, appendix E; float32 holds them exactly."""
BLOCK = 64
GROUP = 256


def quantized_plainly(
    name: str, value: Tensor, family: Family, cfg: ModelConfig, *, quantize: str
) -> Tensor:
    """The value of a parameter as a run holds it: its linears' weights rounded to NF4, in its dtype."""
    is_linear = name.removesuffix(".weight") in cfg.linears()
    if quantize == "none" or not is_linear or not name.endswith(".weight"):
        return value
    out_axis, in_axis = (
        str(axis).partition("+")[0] for axis in logical_axes(name, family.axes(cfg))
    )
    is_own = not cfg.family.startswith("hf:")
    runs_down = is_own and in_axis in cfg.axis_sizes() and out_axis not in cfg.axis_sizes()
    rows = value.float().t() if runs_down else value.float()
    blocks = rows.split(BLOCK, dim=1)
    scales = torch.stack([block.abs().max(dim=1).values for block in blocks], dim=1)
    kept = scales
    if quantize == "nf4_double":
        groups = scales.split(GROUP, dim=1)
        kept = torch.cat([_rounded_scales(group) for group in groups], dim=1)
    parts = zip(blocks, scales.split(1, dim=1), kept.split(1, dim=1), strict=True)
    rounded = torch.cat([_rounded(block, scale, other) for block, scale, other in parts], dim=1)
    return (rounded.t() if runs_down else rounded).to(value.dtype).contiguous()


def _rounded_scales(group: Tensor) -> Tensor:
    """Scales of a row as n / 255 of the largest of them, n the nearest whole number."""
    largest = group.max(dim=1, keepdim=True).values
    shares = torch.where(largest == 0, group, group / largest)
    return (shares * 255).round() / 255 * largest


def _rounded(block: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
    """Each row of a block as levels times `kept`: the level is the one that is nearest to the row
    divided by its scale, of two equally near ones the lower.
    """
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=block.device)
    scaled = torch.where(scale == 0, block, block / scale)
    index = sum((scaled > (low + high) / 2).long() for low, high in pairwise(levels))
    assert isinstance(index, Tensor), "there are borders"
    return levels[index] * kept
