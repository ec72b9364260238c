"""Work of the plain pass: a few whole sequences at a time, plain and perturbed, divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

NUM_PROBES = 2
"""Units that are computed perturbed, too."""


@dataclass(frozen=True)
class Unit:
    """Some sequences of a step that go through the chain together.

    Attributes:
        rows: sequences of the step.
        noise_seeds: of its perturbed passes; () for a plain pass alone.
    """

    rows: range
    noise_seeds: tuple[int, ...] = ()


def unit_size(micro_size: int) -> int:
    """Sequences of a unit: fewer than a micro-batch has, so that a model in which sequences depend
    on those beside them computes something else.
    """
    return max(1, micro_size - 1)


def num_units(*, global_size: int, micro_size: int) -> int:
    """Units of a whole step."""
    return -(-global_size // unit_size(micro_size))


def units_of_rank(
    index: int, num_ranks: int, *, global_size: int, micro_size: int, is_perturbed: bool
) -> tuple[Unit, ...]:
    """The units that one of the ranks computes: consecutive sequences in turn. The first ones are
    perturbed, each with noise of its own; they belong to ranks that have no more units than others.
    """
    size = unit_size(micro_size)
    found = []
    for number in range(
        index, num_units(global_size=global_size, micro_size=micro_size), num_ranks
    ):
        rows = range(number * size, min((number + 1) * size, global_size))
        has_noise = is_perturbed and number < NUM_PROBES
        found.append(Unit(rows, (number + 1,) if has_noise else ()))
    return tuple(found)
