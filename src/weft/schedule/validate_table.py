"""Checks on schedule tables: each action once, on the rank that owns its stage, and an order without deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import product

from weft.errors import Fault, ScheduleError, counted
from weft.schedule.actions import KEY, Act, Kind, Table
from weft.schedule.engine import BlockedRank, PlayOrder, RankRows

MAX_SHOWN = 6
MAX_STUCK_SHOWN = 8
WHOLE_BACKWARD: tuple[Kind, ...] = ("F", "B")
SPLIT_BACKWARD: tuple[Kind, ...] = ("F", "I", "W")


def linearize(table: Table) -> tuple[Act, ...]:
    """All actions in one order that keeps each row's order and puts each action after the actions
    it needs.

    Raises:
        ScheduleError: when there is no such order, with the action at which each rank is blocked
            and what it waits for.
    """
    return tuple(_sources(table))


def play_order(table: Table) -> PlayOrder:
    """The order of `linearize`, to be played.

    Raises:
        ScheduleError: as `linearize`.
    """
    return PlayOrder.of(table, _sources(table))


def _sources(table: Table) -> dict[Act, Act | None]:
    """Of each action, in the order of `linearize`, the one of another stage that it needs."""
    sources: dict[Act, Act | None] = {}
    ranks = RankRows(dict(enumerate(table.rows)))

    def attempt(_: int, act: Act) -> tuple[Act, ...]:
        source = None
        for need in table.needs(act):
            if need not in sources:
                return (need,)
            # a tensor of another stage; the own forward leaves what it saved on the rank
            if need.stage != act.stage:
                source = need
        sources[act] = source
        ranks.wake(act)
        return ()

    waiting = ranks.advance(attempt)
    if waiting:
        raise ScheduleError(_deadlock_fault(table, waiting))
    return sources


def validate(table: Table) -> None:
    """Check that every action is there once, on the rank that owns its stage, and that the table
    does not deadlock.

    Raises:
        ScheduleError: with every fault; each names the actions.
    """
    faults = list(_shape_faults(table))
    # what follows looks up the ranks of stages
    if not faults:
        faults.extend(_action_faults(table))
    if faults:
        raise ScheduleError(*faults)
    linearize(table)


def _shape_faults(table: Table) -> Iterator[Fault]:
    if not table.rows:
        yield Fault(
            KEY, "the table has no ranks", need="at least 1", fix="add a line 'rank 0: F0.0 B0.0'"
        )
    if table.microbatches < 1:
        what = f"the table has {table.microbatches} micro-batches"
        yield Fault(KEY, what, need="at least 1", fix="write 'microbatches 1' or more")
    owners = table.stage_to_rank
    ranks = range(table.num_ranks)
    orphans = [stage for stage, rank in enumerate(owners) if rank not in ranks]
    if orphans:
        yield Fault(
            KEY,
            f"stages {_shown(orphans)} are on no rank",
            got=f"stage_to_rank {owners}",
            need=f"ranks 0 to {table.num_ranks - 1}",
            fix="correct 'stage_to_rank', or add the lines of these ranks",
        )
    idle = [rank for rank in ranks if rank not in owners]
    if idle:
        yield Fault(
            KEY,
            f"ranks {_shown(idle)} own no stage",
            got=f"stage_to_rank {owners}",
            fix="use fewer pp ranks",
        )


def _action_faults(table: Table) -> Iterator[Fault]:
    counts = Counter(table.actions)
    expected = _expected_actions(table)
    missing = [act for act in expected if act not in counts]
    surplus = sorted(counts.keys() - set(expected))
    repeated = [act for act, count in counts.items() if count > 1]
    if missing:
        yield Fault(
            KEY,
            f"the table lacks {_shown(missing)}",
            fix="add them to the rows of the ranks of their stages",
        )
    if surplus:
        stages = counted(table.num_stages, "stage")
        micro_batches = counted(table.microbatches, "micro-batch", "micro-batches")
        yield Fault(
            KEY,
            f"the table must not hold {_shown(surplus)}",
            need=f"{stages}, {micro_batches}, each backward B, or I and W",
            fix="take them out, or correct 'microbatches' and 'stage_to_rank'",
        )
    if repeated:
        yield Fault(
            KEY,
            f"the table runs more than once: {_shown(repeated)}",
            fix="leave each action in one place",
        )
    for rank, row in enumerate(table.rows):
        own_stages = table.stages(rank)
        foreign = [act for act in row if act.stage not in own_stages]
        if foreign:
            yield Fault(
                KEY,
                f"rank {rank} holds {_shown(foreign)}",
                need=f"only its stages {_shown(own_stages)}",
                fix="move them to the ranks of their stages, or correct 'stage_to_rank'",
            )


def _expected_actions(table: Table) -> list[Act]:
    """Every action that a table of these sizes must hold."""
    return [
        Act(kind, stage, mb)
        for stage, mb in product(range(table.num_stages), range(table.microbatches))
        for kind in (SPLIT_BACKWARD if (stage, mb) in table.splits else WHOLE_BACKWARD)
    ]


def _deadlock_fault(table: Table, waiting: Sequence[BlockedRank[Act]]) -> Fault:
    """For each blocked rank: the action it is at, what that waits for, and where the rank is that
    would run it.
    """
    positions = {each.rank: f"rank {each.rank} is at {each.step}" for each in waiting}
    rank_to_run = {
        act: each.rank for each in waiting for act in table.rows[each.rank][each.place :]
    }
    lines: list[str] = []
    for each in waiting[:MAX_STUCK_SHOWN]:
        need = each.lacks[0]
        other = positions[rank_to_run[need]] if need in rank_to_run else "no rank runs it"
        lines.append(f"{positions[each.rank]} and waits for {need} ({other})")
    return Fault(KEY, "the table deadlocks", got="; ".join(lines), fix="reorder these rows")


def _shown(items: Collection[object]) -> str:
    """The first items, and how many more there are."""
    words = [str(item) for item in items]
    text = ", ".join(words[:MAX_SHOWN])
    num_hidden = len(words) - MAX_SHOWN
    if num_hidden > 0:
        text += f" and {num_hidden} more"
    return text
