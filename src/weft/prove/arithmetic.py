"""Number types of a one-device reference, and its perturbations: changes that exact arithmetic would not notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.config.optimizers import is_user_class, rule_names, uses_8_bits
from weft.config.schema import OptimConfig, PrecisionConfig
from weft.core.precision import Dtype

FP8_NOISE = torch.float16
"""Noise of perturbed runs with linears in fp8.

Note [Bounds of fp8]
    A rounding to e4m3 is a step of 1/16 to 1/8, so an error of another rounding moves a product by that
    where an entry is at the edge of two numbers, and else not at all. In float64 no entry of a few steps
    is so near to an edge, and both sides round alike: a run in fp8 is proved with all its other numbers
    in float64, within 1e-9. In other types some entries of a step are, on one side of a comparison and
    not on the other. Noise of one unit of float32 moves as few of them, and other ones. Noise of one
    unit of float16 moves about a hundredth of all entries to another number: more than any layout in
    float32 does.
"""


@dataclass(frozen=True)
class NumberTypes:
    """Number types of parameters, computation and gradient sums.

    Attributes:
        inner: a coarser type to which a user's model casts inside; None: it does not.
    """

    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    inner: torch.dtype | None = None

    @staticmethod
    def of(precision: PrecisionConfig, *, inner: torch.dtype | None = None) -> NumberTypes:
        """Those of a run. See Note [Bounds of fp8]."""
        compute = _dtype(precision.compute)
        if precision.linears == "fp8" and compute != torch.float64:
            inner = max(inner or FP8_NOISE, FP8_NOISE, key=lambda each: torch.finfo(each).eps)
        return NumberTypes(_dtype(precision.params), compute, _dtype(precision.reduce), inner)

    @cached_property
    def eps(self) -> float:
        """The coarsest unit of rounding."""
        types = (self.params, self.compute, self.reduce, self.inner or self.compute)
        return max(torch.finfo(each).eps for each in types)

    def noise_of(self, dtype: torch.dtype) -> float:
        """Relative noise of a perturbed tensor of this type: where the model casts inside, of the
        type to which it casts.
        """
        return max(torch.finfo(each).eps for each in (dtype, self.inner or dtype))

    @cached_property
    def is_exact(self) -> bool:
        """Whether everything is float64."""
        return self.eps == torch.finfo(torch.float64).eps

    @property
    def has_16_bits(self) -> bool:
        """Whether a type is coarser than float32."""
        return self.eps > 2.0**-20


def _dtype(name: Dtype) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class Perturbation:
    """Changes that exact arithmetic would not notice: how far results move is what rounding explains.

    Attributes:
        noise_seed: activations at block boundaries, and their gradients, are multiplied by 1 plus or
            minus one unit of the last place; None: not.
        is_inside_blocks: whether the outputs of all modules inside the blocks are, too.
        is_reversed: micro-batches are added in reverse order.
        micro_size: sequences a micro-batch; 0: as configured.
        free_signs: (parameter, step) -> the entries whose gradient rounding may give either sign: it
            is drawn. None: there are none.
    """

    noise_seed: int | None = None
    is_inside_blocks: bool = False
    is_reversed: bool = False
    micro_size: int = 0
    free_signs: Callable[[str, int], Tensor | None] | None = None


PLAIN = Perturbation()


def magnifies_noise(optim: OptimConfig) -> bool:
    """Whether a gradient that is zero in exact arithmetic, and rounding noise in any other, may have
    an update of full size: that of a sign, or of a ratio without a lower bound.
    """
    return any(name in ("lion", "adafactor") or is_user_class(name) for name in rule_names(optim))


def has_jumps(optim: OptimConfig) -> bool:
    """Whether a rounding error of float32 may change an update by far more than itself: by the sign
    of an entry that is small beside the others, or by rounding a matrix to bfloat16; of a user's
    class that is not known. So does a state whose 8 bits are another code.
    """
    names = rule_names(optim)
    has_rules = any(name in ("lion", "muon") or is_user_class(name) for name in names)
    return has_rules or uses_8_bits(optim)


def perturbations(
    types: NumberTypes, optim: OptimConfig, *, micro_size: int, has_batch_norm: bool = False
) -> Sequence[Perturbation]:
    """What bounds are derived from; none where everything is float64 and updates are proportional
    to gradients, or are damped where these are rounding noise.

    Args:
        micro_size: sequences a micro-batch of the run.
        has_batch_norm: whether the model has BatchNorm: the gradient of a bias before it is the rounding
            of a large sum, which AdamW divides by its own size.
    """
    if types.is_exact and not magnifies_noise(optim) and not has_batch_norm:
        return ()
    other_size = 1 if micro_size > 1 else 2
    return (
        Perturbation(noise_seed=1, is_reversed=True),
        Perturbation(noise_seed=2, is_inside_blocks=True, micro_size=other_size),
    )
