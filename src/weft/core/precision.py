"""Number types of parameters, computation and gradient reduction, and which of them can be combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from weft.errors import Fault

Dtype = Literal["float64", "float32", "bfloat16", "float16"]

REPRESENTS: dict[Dtype, tuple[Dtype, ...]] = {
    "float64": ("float64", "float32", "bfloat16", "float16"),
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}
"""Type -> the types whose numbers it represents exactly. Neither of the 16-bit types represents the
other.
"""

# Note [Which types go together]
# Values are rounded once, from params to compute, and gradients never before they are summed: so `params` and `reduce`
# represent every number of `compute`. A narrower `params` would drop digits that are computed; a narrower `reduce`
# would round every term and every partial sum over micro-batches and ranks, which differ from layout to layout. Sums in
# the type of compute are allowed: that is what pure bfloat16 is.
# float16 has 5 bits of exponent. Gradients are computed at a scale that keeps them in its range (train/loss_scale.py);
# the numbers of an optimizer cannot be scaled so, hence `params` is never float16.


NUM_BYTES: Mapping[Dtype, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number."""


def dtype_faults(*, params: Dtype, compute: Dtype, reduce: Dtype) -> Iterator[Fault]:
    """What is wrong with three types together; see Note [Which types go together]."""
    wide: Dtype = "float64" if compute == "float64" else "float32"
    need = " or ".join(parameter_types(compute))
    fix = f"--precision.params {wide}"
    what = ""
    if params == "float16":
        what = "float16 has no numbers as small as an optimizer's: 1e-8 is 0 in it"
        if compute == "float16":
            fix += "; compute may stay float16"
    elif compute not in REPRESENTS[params]:
        what = f"does not represent every number of the {compute} that is computed in"
    if what:
        yield Fault("precision.params", what, got=params, need=need, fix=fix)
    if compute not in REPRESENTS[reduce]:
        what = f"would drop digits of gradients, which are {compute}"
        if compute == "float16":
            need += " or float16"
        yield Fault(
            "precision.reduce", what, got=reduce, need=need, fix=f"--precision.reduce {wide}"
        )


def parameter_types(compute: Dtype) -> tuple[Dtype, ...]:
    """Types that parameters can have for this type of computation, narrowest first."""
    found: list[Dtype] = []
    for dtype, exact in reversed(REPRESENTS.items()):
        if compute in exact and dtype != "float16":
            found.append(dtype)
    return tuple(found)
