"""Work of the plain pass: a few whole sequences at a time, plain and perturbed, divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    rows: tuple[int, ...]
    noise_seeds: tuple[int, ...] = ()


def unit_size(micro_size: int, *, is_whole: bool = False) -> int:
    """Sequences of a unit: fewer than a micro-batch has, so that a model in which sequences depend
    on those beside them computes something else.

    Args:
        is_whole: the model may do so within a micro-batch, which is a unit then.
    """
    return micro_size if is_whole else max(1, micro_size - 1)


def num_units(*, global_size: int, micro_size: int, is_whole: bool = False) -> int:
    """Units of a whole step."""
    return -(-global_size // unit_size(micro_size, is_whole=is_whole))


def units_of_rank(
    index: int,
    num_ranks: int,
    *,
    global_size: int,
    micro_size: int,
    is_perturbed: bool,
    most_rows: int = 1,
    is_whole: bool = False,
) -> tuple[Unit, ...]:
    """The units that one of the ranks computes: sequences in turn. The first ones are perturbed, each
    with noise of its own; they belong to ranks that have no more sequences than others.

    Args:
        most_rows: sequences up to which units without noise are joined.
        is_whole: each unit is a micro-batch.
    """
    size = unit_size(micro_size, is_whole=is_whole)
    probes: list[Unit] = []
    others: list[tuple[int, ...]] = []
    for number in range(
        index,
        num_units(global_size=global_size, micro_size=micro_size, is_whole=is_whole),
        num_ranks,
    ):
        rows = tuple(range(number * size, min((number + 1) * size, global_size)))
        if is_perturbed and number < NUM_PROBES:
            probes.append(Unit(rows, (number + 1,)))
        else:
            others.append(rows)
    if is_whole:
        return (*probes, *map(Unit, others))
    joined = _joined(others, num_joined=max(1, most_rows // size), micro_size=micro_size)
    return (*probes, *joined)


def _joined(
    parts: Sequence[tuple[int, ...]], *, num_joined: int, micro_size: int
) -> Iterator[Unit]:
    """So many parts as one unit, unless it would be as large as a micro-batch; see `unit_size`."""
    for start in range(0, len(parts), num_joined):
        of_unit = parts[start : start + num_joined]
        rows = tuple(row for part in of_unit for row in part)
        if len(rows) == micro_size:
            yield from map(Unit, of_unit)
        else:
            yield Unit(rows)
