"""The starting values of a run compared with those that transformers draws: constants exactly, drawn ones by mean and deviation.

weft draws projections onto the residual stream with the deviation of the others / sqrt(2 layers)
(Radford et al. 2019, section 2.3); of transformers' classes GPT-2 alone does. So both are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.prove.record import block_of
from weft.prove.report import Difference

MOST_ERRORS = 6.0
"""Standard errors of a mean or a deviation that chance explains, in some thousand tensors."""


@dataclass(frozen=True)
class StartingValues:
    """What a comparison of starting values found."""

    num_constant: int
    num_drawn: int
    differences: tuple[Difference, ...]

    @property
    def note(self) -> str:
        """What was compared, for the report."""
        return (
            f"starting values: {self.num_constant} constants are transformers', {self.num_drawn} "
            "drawn tensors have its mean and deviation, or that deviation / sqrt(2 layers)"
        )


def compare_starting_values(
    run: Mapping[str, Tensor], drawn: Mapping[str, Tensor], *, num_layers: int
) -> StartingValues:
    """Compare the values of a run with a model that transformers has just initialised."""
    constants = {name for name, value in drawn.items() if is_constant(value)}
    found = []
    for name, value in run.items():
        relation = _relation(value, drawn[name], num_layers=num_layers)
        if relation:
            found.append(difference_at_start(f"{name} starting value", name, relation))
    return StartingValues(len(constants), len(run) - len(constants), tuple(found))


def is_constant(value: Tensor) -> bool:
    """Whether all entries are equal."""
    return bool((value == value.flatten()[0]).all())


def _relation(value: Tensor, expected: Tensor, *, num_layers: int) -> str:
    """How starting values differ; "": they do not."""
    if is_constant(expected):
        if torch.equal(value, expected):
            return ""
        return f"not {float(expected.flatten()[0]):g} at the start, as in transformers"
    return next(_faults_of_drawn(value, expected, num_layers=num_layers), "")


def _faults_of_drawn(value: Tensor, expected: Tensor, *, num_layers: int) -> Iterator[str]:
    std = float(value.std())
    right = float(expected.std())
    share = MOST_ERRORS / math.sqrt(value.numel())  # both are samples
    candidates = (right, right / math.sqrt(2 * num_layers))
    if not any(abs(std - each) <= share * each for each in candidates):
        yield f"drawn with deviation {std:.3g}; transformers draws {right:.3g}"
    mean = float(value.mean())
    if abs(mean) > share * max(std, right):
        yield f"drawn with mean {mean:.3g}; transformers draws 0"


def difference_at_start(tensor: str, parameter: str, relation: str) -> Difference:
    """A difference before the first step."""
    return Difference(
        tensor=tensor,
        block=block_of(parameter),
        parameter=parameter,
        phase="batch",
        step=1,
        micro_batch=None,
        axis="",
        ranks=(0,),
        collective="",
        relation=relation,
        measured=math.inf,
        bound=0.0,
    )
