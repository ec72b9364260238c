"""Prompts of a proof of generation: of different lengths, from the rows of the run, continued by different numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NUM_NEW = (6, 2, 5, 3)
"""Tokens that are generated for each prompt, so that rows of a batch end one after the other."""
LENGTHS = (1, 7, 3, 12)
BLOCK_CELLS = 256
"""Cells by which a cache grows; one prompt and its tokens pass this number."""
BEFORE_GROWTH = 3
"""Tokens of that prompt before the cache grows."""


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and how its text goes on.

    Attributes:
        tokens: one at least.
        num_new: tokens that follow it.
    """

    tokens: tuple[int, ...]
    num_new: int


def prompts_of(
    stream: Sequence[int], *, most_positions: int | None, is_long: bool
) -> tuple[Prompt, ...]:
    """The prompts that a proof generates from.

    Args:
        stream: tokens of the run, repeated where there are too few.
        most_positions: that the model has learned; None: it computes any number.
        is_long: whether one prompt is so long that the cache grows while it is continued.
    """
    found = []
    start = 0
    for length, num_new in _sizes(is_long=is_long):
        if most_positions is not None:
            num_new = min(num_new, most_positions - 1)
            length = min(length, most_positions - num_new)
        tokens = tuple(stream[(start + place) % len(stream)] for place in range(length))
        start += length
        found.append(Prompt(tokens, num_new))
    return tuple(found)


def _sizes(*, is_long: bool) -> Iterator[tuple[int, int]]:
    yield from zip(LENGTHS, NUM_NEW, strict=True)
    if is_long:
        yield BLOCK_CELLS - BEFORE_GROWTH, 2 * BEFORE_GROWTH
