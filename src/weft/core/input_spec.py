"""Named arrays of a sample, for models that read neither text nor digits: shape, type and range of each. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TARGETS = "targets"
"""Name of the array of whole numbers that the loss counts, if there is one."""
DTYPES = (*("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"),)


@dataclass(frozen=True)
class InputSpec:
    """One named array of a sample, as a model file declares it in INPUTS.

    Attributes:
        shape: of one sample, without the dimension of the batch; () is a number a sample.
        dtype: one of `DTYPES`. Stored numbers of a type that it holds exactly are converted.
        below: whole numbers are 0 or more and below this, such as the ids of an embedding or the
            classes of targets, where -100 does not count; None: any.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    below: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are whole."""
        return not self.dtype.startswith("float")

    @property
    def text(self) -> str:
        """Type and shape as messages show them: `float32 [3, 32, 32]`."""
        return f"{self.dtype} {list(self.shape)}"


def spec_problem(specs: Any) -> str | None:
    """What is wrong with the value of INPUTS, a mapping of names to specs; None: nothing."""
    if not isinstance(specs, Mapping) or not specs:
        return f"INPUTS is {type(specs).__name__}, not a mapping of names to weft.InputSpec"
    for name, spec in specs.items():
        if not isinstance(name, str) or not name.isidentifier():
            return f"INPUTS: {name!r} is no name"
        if not isinstance(spec, InputSpec):
            return f"INPUTS[{name!r}] is {type(spec).__name__}, not weft.InputSpec"
        if spec.dtype not in DTYPES:
            return f"INPUTS[{name!r}]: dtype {spec.dtype!r} is none of {', '.join(DTYPES)}"
        sizes = spec.shape
        if not isinstance(sizes, tuple) or not all(isinstance(n, int) and n > 0 for n in sizes):
            return f"INPUTS[{name!r}]: shape {sizes!r} is no tuple of sizes above 0"
        if spec.below is not None and (not spec.is_whole or spec.below < 1):
            return f"INPUTS[{name!r}]: below {spec.below!r} is for whole numbers, and above 0"
    if next(iter(specs)) == TARGETS:
        return "INPUTS begins with targets; its first array is what the first block reads"
    targets = specs.get(TARGETS)
    if targets is not None and not targets.is_whole:
        return "INPUTS['targets'] are no whole numbers, which the loss counts; give others another name"
    return None
