"""Owns random tables that play: what tests of lowering, players and simulators run over, beyond the known schedules."""

from __future__ import annotations

from itertools import product
from random import Random

from weft.schedule.actions import Act, Table, needs


def random_table(dice: Random, *, ranks: int, stages: int, microbatches: int) -> Table:
    """Any homes (each rank owns a stage), whole and split backwards mixed, and any order that respects who waits.

    Needs `stages` >= `ranks` >= 1. Every valid table of these sizes can come out.
    """
    home = [*range(ranks), *(dice.randrange(ranks) for _ in range(stages - ranks))]
    dice.shuffle(home)
    pairs = list(product(range(stages), range(microbatches)))
    splits = {pair for pair in pairs if dice.random() < 0.5}
    todo = {Act(kind, *pair) for pair in pairs for kind in (("F", "I", "W") if pair in splits else ("F", "B"))}
    done: set[Act] = set()
    rows: list[list[Act]] = [[] for _ in range(ranks)]
    while todo:
        ready = [act for act in todo if done.issuperset(needs(act, num_stages=stages, splits=splits))]
        act = dice.choice(sorted(ready))
        rows[home[act.stage]].append(act)
        todo.remove(act)
        done.add(act)
    return Table(tuple(map(tuple, rows)), tuple(home), microbatches)
