"""Kinds of actions of a schedule by their costs, and the micro-batches that are played for all.

Note [A step in regions]
    The step is recorded as regions: each action of the schedule's row, and what lies between and
    after them. What an action does depends on its kind, its stage, and on whether its micro-batch
    is the first, a middle or the last one (gradients are allocated by the first backward and
    reduced by the last). So of a step of many micro-batches three are played, and every other
    action is one that was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.schedule.actions import Act, Table
from weft.schedule.simulate import ACTIVATION_CHANGE

MOST_PLAYED = 3
"""Micro-batches that are played of a longer step; see Note [A step in regions]."""

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


def played_microbatches(
    table: Table,
    row: int,
) -> tuple[int, ...]:
    """Micro-batches that stand for all on a pipeline coordinate: all of a short step, else those of
    the first and the last action of each stage and direction, and others until every key of its
    actions is there.
    """
    if table.microbatches <= MOST_PLAYED:
        return tuple(range(table.microbatches))
    chosen: set[int] = set()
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


def thinned(
    table: Table,
    chosen: tuple[int, ...],
) -> Table:
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
    return Table.of_rows(
        rows,
        stage_to_rank=table.stage_to_rank,
        microbatches=len(chosen),
    )


def action_keys(
    table: Table,
    row: int,
) -> dict[Act, ActionKey]:
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
