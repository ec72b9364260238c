"""Work of the plain pass: micro-batches of whole sequences, plain and perturbed, divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

NUM_PROBES = 2
"""Micro-batches that are computed perturbed, too."""


@dataclass(frozen=True)
class Unit:
    """Some sequences of a step that go through the chain together.

    Attributes:
        rows: sequences of the step.
        noise_seeds: of its perturbed passes; () for a plain pass alone.
    """

    rows: range
    noise_seeds: tuple[int, ...] = ()


def units_of_rank(
    index: int,
    num_ranks: int,
    *,
    global_size: int,
    micro_size: int,
    is_perturbed: bool,
) -> tuple[Unit, ...]:
    """The units that one of the ranks computes: micro-batches in turn. The first ones are perturbed,
    each with noise of its own; they belong to ranks that have no more of them than others.
    """
    num_units = -(-global_size // micro_size)
    found = []
    for number in range(num_units):
        if number % num_ranks != index:
            continue
        start = number * micro_size
        rows = range(start, min(start + micro_size, global_size))
        has_noise = is_perturbed and number < NUM_PROBES
        found.append(Unit(rows, (number + 1,) if has_noise else ()))
    return tuple(found)


def num_units(*, global_size: int, micro_size: int) -> int:
    """Units of a whole step."""
    return -(-global_size // micro_size)
