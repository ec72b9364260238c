"""Numeric relation of a wrong tensor to the right one: a factor, a missing term, another shard, another order, another step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

CLOSE = 1e-3
"""Relative residual within which a relation holds."""
SHARE_OF_DISTANCE = 0.02
"""A relation explains a tensor if what is left is at most this share of its distance to the right one."""
MAX_DENOMINATOR = 8
FRACTION_CLOSE = 1e-5
"""Relative distance within which a factor is written as a fraction."""
COARSE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Number types to which values may be rounded by mistake, coarse ones first."""
MOST_LISTED = 8
"""Indices of wrong entries that are named."""
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
        if candidate.shape != measured.shape:
            continue
        if _is_close(measured, candidate.double(), expected):
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
        rounded = measured.to(dtype).double()
        if not torch.equal(rounded, measured):
            continue
        size = expected.abs().max()
        unit = torch.finfo(dtype).eps * size
        rounding = expected.to(dtype).double() - expected
        distance = measured - expected
        is_between = bool(rounding.abs().max() > ROUNDING_SHARE * unit)
        is_near = bool(distance.abs().max() <= 2 * unit)
        return dtype if is_between and is_near else None
    return None


def dtype_text(dtype: torch.dtype) -> str:
    """The name of a dtype as config keys have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def factor_of(measured: Tensor, expected: Tensor) -> float | None:
    """k where measured = k expected; None where there is no such number other than 1."""
    square = float((expected * expected).sum())
    if square == 0:
        return None
    product = float((measured * expected).sum())
    factor = product / square
    if abs(factor - 1) < 1e-9 or factor == 0:
        return None
    residual = float((measured - factor * expected).norm())
    size = float(measured.norm())
    distance = float((measured - expected).norm())
    explains = residual <= CLOSE * size and residual <= SHARE_OF_DISTANCE * distance
    return factor if explains else None


def _factor_text(factor: float) -> str:
    near = Fraction(factor).limit_denominator(MAX_DENOMINATOR)
    if near in (0, 1):
        return f"{factor:.6g}"
    distance = abs(float(near) / factor - 1)
    return str(near) if distance < FRACTION_CLOSE else f"{factor:.6g}"


def _is_close(measured: Tensor, candidate: Tensor, expected: Tensor) -> bool:
    """Whether the measured tensor is the candidate, and much nearer to it than to the right one."""
    distance = float((measured - candidate).norm())
    to_right = float((measured - expected).norm())
    candidate_size = float(candidate.norm())
    measured_size = float(measured.norm())
    size = max(candidate_size, measured_size)
    return distance <= CLOSE * size and distance <= SHARE_OF_DISTANCE * to_right


def _is_equal_up_to_order(measured: Tensor, expected: Tensor) -> bool:
    """Whether two lists of numbers are close once they are sorted, and are not before."""
    ordered = measured.sort().values
    right = expected.sort().values
    size = float(right.norm())
    distance = float((ordered - right).norm())
    unsorted = float((measured - expected).norm())
    return distance <= CLOSE * size and distance <= SHARE_OF_DISTANCE * unsorted


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
        if expected.shape[dim] <= 2:
            continue
        for shift in (1, -1):
            shifted = expected.roll(shift, dim)
            if _matches_inside(measured, shifted, dim, shift):
                return f"shifted by {shift:+d} along dim {dim}"
    if bool(expected.any()) and _is_equal_up_to_order(measured.flatten(), expected.flatten()):
        return "the right values in another order (permutation)"
    if expected.dim() > 1 and len(expected) > 2:
        own_rows = measured.flatten(1).sum(1)
        right_rows = expected.flatten(1).sum(1)
        if _is_equal_up_to_order(own_rows, right_rows):
            return "rows of the right values in another order (permutation)"
    return ""


def _matches_inside(measured: Tensor, shifted: Tensor, dim: int, shift: int) -> bool:
    """Whether all but the entry that wraps around agree."""
    length = measured.shape[dim] - 1
    start = 1 if shift > 0 else 0
    own = measured.narrow(dim, start, length)
    right = shifted.narrow(dim, start, length)
    first = right.flatten()[0]
    is_constant = bool((right == first).all())
    if is_constant or not bool(right.any()):
        return False
    return bool(torch.allclose(own, right, rtol=CLOSE, atol=0.0))


def _partly(measured: Tensor, expected: Tensor) -> str:
    """Which share of the entries differs."""
    scale = float(expected.abs().max()) or 1.0
    difference = (measured - expected).abs()
    wrong = difference > 1e-6 * scale
    share = float(wrong.double().mean())
    if share >= 0.999 or share == 0:
        return "different in all entries"
    for dim, size in enumerate(expected.shape):
        places = _wrong_places(wrong, dim)
        are_few = len(places) < size and len(places) <= size // 2
        if are_few:
            return f"wrong at {_listed(places)} of dim {dim} (of {size})"
    return f"different in {share:.0%} of the entries"


def _listed(places: Sequence[int]) -> str:
    """The first indices: "0 3 5 ..."."""
    words = [str(place) for place in places[:MOST_LISTED]]
    if len(places) > MOST_LISTED:
        words.append("...")
    return " ".join(words)


def _wrong_places(wrong: Tensor, dim: int) -> list[int]:
    """Indices along a dim at which any entry is wrong."""
    others = list(range(wrong.dim()))
    others.remove(dim)
    if others:
        wrong = wrong.any(dim=others)
    places: list[int] = wrong.nonzero().flatten().tolist()
    return places
