"""Owns which number types go together: what the optimizer moves, what is computed in, what gradients are summed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from weft.errors import Fault

Dtype = Literal["float64", "float32", "bfloat16", "float16"]

REPRESENTS: dict[Dtype, tuple[Dtype, ...]] = {
    "float64": ("float64", "float32", "bfloat16", "float16"),
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}
"""Type -> the types all of whose numbers it has. The two of 16 bits have numbers that the other lacks."""

# Note [Which types go together]
# Values are rounded once, from params to compute, and gradients never before they are summed: so `params` and `reduce`
# have every number of `compute`. A narrower `params` would compute with digits that nobody keeps; a narrower `reduce`
# would round every term and every partial sum over micro-batches and ranks, which differ from layout to layout. Sums in
# the type of compute are allowed: that is what pure bfloat16 is.
# float16 has 5 bits of exponent. Gradients are computed at a scale that keeps them in its range (train/precision.py);
# the numbers of an optimizer cannot be scaled so, hence `params` is never float16.


def dtype_faults(*, params: Dtype, compute: Dtype, reduce: Dtype) -> Iterator[Fault]:
    """What is wrong with three types together; see Note [Which types go together]."""
    wide: Dtype = "float64" if compute == "float64" else "float32"
    if params == "float16":
        what = "float16 has no numbers as small as an optimizer's: 1e-8 is 0 in it"
        fix = f"--precision.params {wide}" + "; compute may stay float16" * (compute == "float16")
        yield Fault("precision.params", what, params, " or ".join(_holders(compute)), fix)
    elif compute not in REPRESENTS[params]:
        what = f"has not every number of the {compute} that is computed in"
        yield Fault("precision.params", what, params, " or ".join(_holders(compute)), f"--precision.params {wide}")
    if compute not in REPRESENTS[reduce]:
        what = f"would drop digits of gradients, which come in {compute}"
        need = " or ".join((*_holders(compute), *(("float16",) if compute == "float16" else ())))
        yield Fault("precision.reduce", what, reduce, need, f"--precision.reduce {wide}")


def _holders(compute: Dtype) -> tuple[Dtype, ...]:
    """Types that can hold parameters for this type of compute, nearest first."""
    return tuple(dtype for dtype, held in reversed(REPRESENTS.items()) if compute in held and dtype != "float16")
