"""Groups for small collectives over all ranks: stages of at most 16 ranks, so that a rank talks to O(log world) others.

Note [World stages]
    A process group of gloo connects every pair of its members: a group of all ranks would cost each
    of 16,384 ranks 16,383 sockets. The world size is written as a product of factors of at most 16
    (16,384 = 16 * 16 * 16 * 4); the ranks that differ in one digit only form a group of that stage.
    A number that is combined within each stage, from the innermost to the outermost, is combined
    over the world. All ranks combine the same numbers in the same order, so all get the same bits.
    On GPUs the stages of a larger world are the groups along mesh axes, whose communicators exist
    anyway: `planned_groups.world_partition`.
"""

from __future__ import annotations

from weft.comm.axis_group import AxisGroup

MAX_STAGE_RANKS = 16


def stage_sizes(world_size: int) -> tuple[int, ...]:
    """Sizes of the stages, innermost first: their product is the world size.

    Each is at most 16, unless the world size has a larger prime factor.
    """
    sizes: list[int] = []
    for factor in _prime_factors(world_size):
        for place, size in enumerate(sizes):
            if size * factor <= MAX_STAGE_RANKS:
                sizes[place] *= factor
                break
        else:
            sizes.append(factor)
    return tuple(sizes)


def _prime_factors(number: int) -> list[int]:
    """Prime factors, largest first."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return sorted(factors, reverse=True)


def world_stages(rank: int, world_size: int, *, checked: bool) -> tuple[AxisGroup, ...]:
    """The groups of `rank`, one for each stage, innermost first; () for a world of one rank."""
    sizes = stage_sizes(world_size)
    groups = []
    stride = 1
    for stage, size in enumerate(sizes):
        width = size * stride
        index = rank // stride % size
        first = rank - index * stride
        name = "world"
        if len(sizes) > 1:
            name = f"world, stage {stage + 1} of {len(sizes)}"
        group = AxisGroup(
            axis=name,
            ranks=tuple(range(first, first + width, stride)),
            index=index,
            checked=checked,
        )
        groups.append(group)
        stride = width
    return tuple(groups)
