"""Kinds of actions of a schedule by their costs, and the micro-batches that are played for all.

Note [A step in regions]
    The step is recorded as regions: each action of the schedule's row, and what lies between and
    after them. What an action does depends on its kind, its stage, and on whether its micro-batch
    is the first, a middle or the last one (gradients are allocated by the first backward and
    reduced by the last). So of a step of many micro-batches three are played, and every other
    action is one that was recorded.

Note [Sums in a fixed order]
    Under `deterministic` the gradients of micro-batches are added in a binary tree, so how many
    sums a backward leaves depends on the number of its micro-batch: on how many ones that ends with
    in binary. So the first 16 are played, and each later one is taken for one of these that ends
    with as many, up to three; what a longer row of ones frees besides is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.schedule.actions import Act, Table
from weft.schedule.simulate import ACTIVATION_CHANGE

MOST_PLAYED = 3
"""Micro-batches that are played of a longer step; see Note [A step in regions]."""

MOST_IN_FIXED_ORDER = 16
"""The same where gradients are added in a fixed order; see Note [Sums in a fixed order]."""
MOST_ONES = 3
"""Ones at the end of a micro-batch's number that played micro-batches tell apart."""
PERIOD = 8
"""2 to the power of `MOST_ONES`."""

Place = Literal["first", "middle", "last"]


@dataclass(frozen=True)
class ActionKey:
    """What decides the costs of an action on its rank; see Note [A step in regions].

    Attributes:
        chunk: place of its stage among the stages of the rank.
    """

    kind: str
    chunk: int
    place: Place


class PlayedAction(NamedTuple):
    """An action of a micro-batch on its rank."""

    kind: str
    chunk: int
    microbatch: int


def played_microbatches(table: Table, row: int, *, fixed_order: bool = False) -> tuple[int, ...]:
    """Micro-batches that stand for all on a pipeline coordinate: all of a short step, else those of
    the first and the last action of each stage and direction, and others until every key of its
    actions is there.

    Args:
        fixed_order: whether gradients are added in a fixed order.
    """
    most = MOST_IN_FIXED_ORDER if fixed_order else MOST_PLAYED
    if table.microbatches <= most:
        return tuple(range(table.microbatches))
    chosen = set(range(most)) if fixed_order else set()
    missing: set[ActionKey] = set()
    middle: dict[int, set[ActionKey]] = {}
    for act, key in action_keys(table, row).items():
        if key.place != "middle":
            chosen.add(act.mb)
            continue
        missing.add(key)
        keys_of_mb = middle.setdefault(act.mb, set())
        keys_of_mb.add(key)
    for mb in chosen:
        missing -= middle.get(mb, set())
    while missing:
        num_missing = {mb: len(keys & missing) for mb, keys in middle.items()}
        best = max(sorted(middle), key=num_missing.__getitem__)
        chosen.add(best)
        missing -= middle[best]
    return tuple(sorted(chosen))


def ones_at_end(number: int) -> int:
    """Ones at the end of a number in binary: how many sums its gradient is added to."""
    return (~number & (number + 1)).bit_length() - 1


def alike_in_fixed_order(microbatch: int) -> int:
    """A played micro-batch that stands for this one; see Note [Sums in a fixed order]."""
    if microbatch < MOST_IN_FIXED_ORDER - 1:
        return microbatch
    if ones_at_end(microbatch) >= MOST_ONES:
        return PERIOD - 1
    return PERIOD + microbatch % PERIOD


def thinned(table: Table, chosen: tuple[int, ...]) -> Table:
    """The table with these micro-batches alone, numbered from 0; the order of actions stays."""
    numbers = {mb: number for number, mb in enumerate(chosen)}
    rows = []
    for row in table.rows:
        kept = []
        for act in row:
            number = numbers.get(act.mb)
            if number is not None:
                kept.append(Act(act.kind, act.stage, number))
        rows.append(kept)
    return Table.of_rows(rows, stage_to_rank=table.stage_to_rank, microbatches=len(chosen))


def action_keys(table: Table, row: int) -> dict[Act, ActionKey]:
    """The key of each action of a row, in order; equal keys are one object."""
    actions = table.rows[row]
    chunks = {stage: chunk for chunk, stage in enumerate(table.stages(row))}
    first: dict[_Direction, Act] = {}
    last: dict[_Direction, Act] = {}
    for act in actions:
        direction = _direction(act)
        first.setdefault(direction, act)
        last[direction] = act
    made: dict[ActionKey, ActionKey] = {}
    keys: dict[Act, ActionKey] = {}
    for act in actions:
        direction = _direction(act)
        place: Place = "middle"
        if act == last[direction]:
            place = "last"
        elif act == first[direction]:
            place = "first"
        chunk = chunks[act.stage]
        key = ActionKey(act.kind, chunk, place)
        keys[act] = made.setdefault(key, key)
    return keys


_Direction = tuple[int, bool]
"""A stage, and whether its actions free activations."""


def _direction(act: Act) -> _Direction:
    return act.stage, ACTIVATION_CHANGE[act.kind] < 0
