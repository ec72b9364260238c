"""Numeric relation of a wrong tensor to the right one: a factor, a missing term, another shard, another order, another step."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

CLOSE = 1e-3
"""Relative residual within which a relation holds."""
MAX_DENOMINATOR = 8
FRACTION_CLOSE = 1e-5
"""Relative distance within which a factor is written as a fraction."""
COARSE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Number types to which values may be rounded by mistake, coarse ones first."""
MIN_ROUNDED = 8
"""Fewest entries that say anything about their number type."""
ROUNDING_SHARE = 1e-3
"""Least share of a unit of the coarse type by which the right values lie beside it."""


def relation(
    measured: Tensor,
    expected: Tensor,
    *,
    candidates: Mapping[str, Tensor],
    before: Tensor | None = None,
) -> str:
    """How `measured` relates to `expected`, as the end of "the tensor is ...".

    Args:
        candidates: phrase -> a tensor that the measured one may be by mistake.
        before: the value before this step, of a parameter: its update is compared, too.
    """
    if measured.shape != expected.shape:
        return f"of shape {list(measured.shape)} in place of {list(expected.shape)}"
    measured = measured.double()
    expected = expected.double()
    if not bool(torch.isfinite(measured).all()):
        return "not finite"
    if not measured.numel():
        return "empty"
    if not bool(measured.any()):
        return "zero"
    for phrase, candidate in candidates.items():
        if candidate.shape == measured.shape and _is_close(measured, candidate.double(), expected):
            return phrase
    if before is not None and before.shape == measured.shape:
        update = _update_relation(measured, expected, before.double())
        if update:
            return update
    coarse = rounded_to(measured, expected)
    if coarse is not None:
        return f"rounded to {dtype_text(coarse)}"
    factor = factor_of(measured, expected)
    if factor is not None:
        return f"{_factor_text(factor)} times the right values"
    rearranged = _rearrangement(measured, expected)
    if rearranged:
        return rearranged
    return _partly(measured, expected)


def rounded_to(measured: Tensor, expected: Tensor) -> torch.dtype | None:
    """The number type of which all measured entries are, and the right ones, which are near, are
    not; None where there is none.
    """
    if measured.shape != expected.shape or measured.numel() < MIN_ROUNDED:
        return None
    measured = measured.double()
    expected = expected.double()
    for dtype in COARSE_TYPES:
        if not torch.equal(measured.to(dtype).double(), measured):
            continue
        unit = torch.finfo(dtype).eps
        beside = (expected.to(dtype).double() - expected).abs().max()
        distance = (measured - expected).abs().max()
        size = expected.abs().max()
        is_between = bool(beside > ROUNDING_SHARE * unit * size)
        is_near = bool(distance <= 2 * unit * size)
        return dtype if is_between and is_near else None
    return None


def dtype_text(dtype: torch.dtype) -> str:
    """Its name, as config keys have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def factor_of(measured: Tensor, expected: Tensor) -> float | None:
    """k where measured = k expected; None where there is no such number other than 1."""
    square = float((expected * expected).sum())
    if square == 0:
        return None
    factor = float((measured * expected).sum()) / square
    if abs(factor - 1) < 1e-9 or factor == 0:
        return None
    residual = float((measured - factor * expected).norm())
    size = float(measured.norm())
    distance = float((measured - expected).norm())
    if residual <= CLOSE * size and residual <= 0.02 * distance:
        return factor
    return None


def _factor_text(factor: float) -> str:
    near = Fraction(factor).limit_denominator(MAX_DENOMINATOR)
    is_near = near not in (0, 1) and abs(float(near) / factor - 1) < FRACTION_CLOSE
    return str(near) if is_near else f"{factor:.6g}"


def _is_close(measured: Tensor, candidate: Tensor, expected: Tensor) -> bool:
    """Whether the measured tensor is the candidate, and much nearer to it than to the right one."""
    distance = float((measured - candidate).norm())
    size = max(float(candidate.norm()), float(measured.norm()))
    to_right = float((measured - expected).norm())
    return distance <= CLOSE * size and distance <= 0.02 * to_right


def _update_relation(measured: Tensor, expected: Tensor, before: Tensor) -> str:
    right = expected - before
    update = measured - before
    if not bool(update.any()):
        return "not updated: the value of the step before (stale)"
    factor = factor_of(update, right)
    if factor is None:
        return ""
    return f"updated by {_factor_text(factor)} times the right change"


def _rearrangement(measured: Tensor, expected: Tensor) -> str:
    """A shift by one, or another order of the same values."""
    for dim in range(expected.dim()):
        for shift in (1, -1):
            shifted = expected.roll(shift, dim)
            if expected.shape[dim] > 2 and _matches_inside(measured, shifted, dim, shift):
                return f"shifted by {shift:+d} along dim {dim}"
    ordered = measured.flatten().sort().values
    right = expected.flatten().sort().values
    if bool(right.any()) and _is_close(ordered, right, torch.zeros_like(right)):
        return "the right values in another order (permutation)"
    if expected.dim() > 1 and len(expected) > 2:
        own = measured.flatten(1).sum(1)
        rows = expected.flatten(1).sum(1)
        if _is_close(own.sort().values, rows.sort().values, torch.zeros_like(rows)):
            return "rows of the right values in another order (permutation)"
    return ""


def _matches_inside(measured: Tensor, shifted: Tensor, dim: int, shift: int) -> bool:
    """Whether all but the entry that wraps around agree."""
    length = measured.shape[dim] - 1
    start = 1 if shift > 0 else 0
    own = measured.narrow(dim, start, length)
    right = shifted.narrow(dim, start, length)
    if not bool(right.any()) or bool((right == right.flatten()[0]).all()):
        return False
    return bool(torch.allclose(own, right, rtol=CLOSE, atol=0.0))


def _partly(measured: Tensor, expected: Tensor) -> str:
    """Which share of the entries differs."""
    scale = float(expected.abs().max()) or 1.0
    wrong = (measured - expected).abs() > 1e-6 * scale
    share = float(wrong.double().mean())
    if share >= 0.999 or share == 0:
        return "other values in all entries"
    for dim in range(expected.dim()):
        others = [other for other in range(expected.dim()) if other != dim]
        by_entry = wrong.any(dim=others) if others else wrong
        places = by_entry.nonzero().flatten().tolist()
        if len(places) < expected.shape[dim] and len(places) <= expected.shape[dim] // 2:
            shown = " ".join(map(str, places[:8]))
            more = " ..." if len(places) > 8 else ""
            return f"wrong at {shown}{more} of dim {dim} (of {expected.shape[dim]})"
    return f"other values in {share:.0%} of the entries"
