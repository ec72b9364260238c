"""Random valid tables, for property tests of lowering, the player and the simulator."""

from __future__ import annotations

from itertools import product
from random import Random

from weft.schedule.actions import Act, Table, needs
from weft.schedule.validate_table import SPLIT_BACKWARD, WHOLE_BACKWARD


def random_table(dice: Random, *, ranks: int, stages: int, microbatches: int) -> Table:
    """Random stage owners (each rank owns a stage), whole and split backwards mixed, any order that
    respects `needs`.

    Needs `stages` >= `ranks` >= 1. Every valid table of these sizes can be drawn.
    """
    more_stages = [dice.randrange(ranks) for _ in range(stages - ranks)]
    stage_to_rank = [*range(ranks), *more_stages]
    dice.shuffle(stage_to_rank)
    pairs = list(product(range(stages), range(microbatches)))
    splits = {pair for pair in pairs if dice.random() < 0.5}
    pending: set[Act] = set()
    for stage, mb in pairs:
        kinds = SPLIT_BACKWARD if (stage, mb) in splits else WHOLE_BACKWARD
        pending.update(Act(kind, stage, mb) for kind in kinds)
    done: set[Act] = set()
    rows: list[list[Act]] = [[] for _ in range(ranks)]
    while pending:
        ready = []
        for act in sorted(pending):
            needed = needs(act, num_stages=stages, splits=splits)
            if done.issuperset(needed):
                ready.append(act)
        chosen = dice.choice(ready)
        rank = stage_to_rank[chosen.stage]
        rows[rank].append(chosen)
        pending.remove(chosen)
        done.add(chosen)
    return Table(tuple(map(tuple, rows)), tuple(stage_to_rank), microbatches)
