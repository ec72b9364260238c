"""Searched tables: equal to brute force on tiny sizes, valid, within the limit, never worse than built-in schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest

from weft.errors import ScheduleError
from weft.schedule.actions import Act, Table, needs
from weft.schedule.catalog import make_table
from weft.schedule.costs import ScheduleCosts
from weft.schedule.simulate import peak_live
from weft.schedule.validate_table import validate
from weft_plan.schedule_search import program, table_search
from weft_plan.schedule_search.compare import ScheduleFigures
from weft_plan.schedule_search.table_search import SearchRequest, SearchResult, fits, search

SPLIT_OF_2 = (
    "F0 F1 I0 I1 W0 W1",
    "F0 F1 I0 W0 I1 W1",
    "F0 I0 F1 I1 W0 W1",
    "F0 I0 F1 W0 I1 W1",
    "F0 I0 W0 F1 I1 W1",
)
"""The rows of two micro-batches whose F, I and W are each in order."""


def searched(
    p: int,
    m: int,
    limit: float,
    *words: str,
    message: str = "0",
    chunks: tuple[int, ...] = (1,),
    seconds: float = 20.0,
) -> SearchResult:
    request = SearchRequest(
        ranks=p,
        microbatches=m,
        limits=(Fraction(str(limit)),) * p,
        costs=ScheduleCosts.parse(words, message=message),
        chunks=chunks,
        seconds=seconds,
    )
    return search(request)


def shortest(tables: Iterator[Table], limit: int, costs: ScheduleCosts) -> Fraction:
    """Makespan of the shortest table within the limit; tables that deadlock are left out."""
    found: list[Fraction] = []
    for table in tables:
        if max(peak_live(table)) > limit:
            continue
        try:
            found.append(ScheduleFigures("table", table, costs).makespan)
        except ScheduleError:
            continue
    return min(found)


def all_orders(rank: int, mb_orders: tuple[str, ...]) -> list[tuple[Act, ...]]:
    return [
        tuple(Act(word[0], rank, int(word[1])) for word in words.split()) for words in mb_orders
    ]


def tables_of(rows_by_rank: list[list[tuple[Act, ...]]], m: int) -> Iterator[Table]:
    for rows in itertools.product(*rows_by_rank):
        yield Table(rows, tuple(range(len(rows))), m)


def free_rows(rank: int, m: int) -> list[tuple[Act, ...]]:
    """Every order of a rank's actions in which each micro-batch goes F, I, W."""
    words = [mb for mb in range(m) for _ in "FIW"]
    rows = []
    for order in set(itertools.permutations(words)):
        seen = [0] * m
        row = []
        for mb in order:
            row.append(Act("FIW"[seen[mb]], rank, mb))
            seen[mb] += 1
        rows.append(tuple(row))
    return rows


@pytest.mark.parametrize(
    ("words", "message", "limit"),
    [
        ((), "0", 1),
        ((), "0", 2),
        (("F=1", "I=2", "W=1"), "0", 2),
        (("F=2", "I=3", "W=1"), "1", 2),
        (("F=1,2", "I=1,2", "W=2,1"), "0.5", 2),
    ],
)
def test_two_ranks_and_two_micro_batches_equal_every_order_there_is(
    words: tuple[str, ...], message: str, limit: int
) -> None:
    """400 tables, those included whose micro-batches are not in order."""
    result = searched(2, 2, limit, *words, message=message)
    costs = result.request.costs
    tables = tables_of([free_rows(rank, 2) for rank in range(2)], 2)
    assert result.is_optimal
    assert result.best.makespan == result.bound == shortest(tables, limit, costs)


@pytest.mark.parametrize(("words", "limit"), [((), 2), (("F=2", "I=3", "W=2"), 1)])
def test_three_ranks_equal_every_table_whose_micro_batches_are_in_order(
    words: tuple[str, ...], limit: int
) -> None:
    result = searched(3, 2, limit, *words)
    tables = tables_of([all_orders(rank, SPLIT_OF_2) for rank in range(3)], 2)
    assert result.best.makespan == result.bound
    assert result.best.makespan == shortest(tables, limit, result.request.costs)


def _linear(rank, owners, every, splits) -> list[tuple[Act, ...]]:
    """Orders of a rank's actions in which none comes before one it needs on the same rank."""
    own = [act for act in every if owners[act.stage] == rank]
    before = {act: reaching(act, splits) & set(own) for act in own}
    found: list[tuple[Act, ...]] = []

    def extend(row: tuple[Act, ...]) -> None:
        if len(row) == len(own):
            found.append(row)
        for act in own:
            if act not in row and before[act] <= set(row):
                extend((*row, act))

    extend(())
    return found


def reaching(act: Act, splits) -> set[Act]:
    """All actions that come before `act`."""
    found: set[Act] = set()
    pending = [act]
    while pending:
        for need in needs(pending.pop(), num_stages=4, splits=splits):
            if need not in found:
                found.add(need)
                pending.append(need)
    return found


def test_a_v_of_one_micro_batch_equals_every_order() -> None:
    costs = ScheduleCosts.parse(["F=2", "I=4", "W=2"])
    owners = (0, 1, 1, 0)
    splits = set(itertools.product(range(4), range(1)))
    every = [Act(kind, stage, 0) for kind in "FIW" for stage in range(4)]
    rows = [_linear(rank, owners, every, splits) for rank in range(2)]
    tables = (Table(both, owners, 1) for both in itertools.product(*rows))
    result = searched(2, 1, 1, "F=2", "I=4", "W=2", chunks=(2,))
    assert result.best.makespan == result.bound == shortest(tables, 2, costs)


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_found_table_is_valid_within_the_limit_and_no_longer_than_built_in_ones(
    limit: int,
) -> None:
    result = searched(3, 4, limit, chunks=(1, 2), seconds=4)
    best = result.best
    validate(best.table)
    assert fits(best, result.request.limits)
    for figures in result.built_in:
        if fits(figures, result.request.limits):
            assert best.makespan <= figures.makespan
    assert result.bound <= best.makespan


def test_zb_h1_is_the_shortest_table_of_one_stage_a_rank_where_all_times_are_equal() -> None:
    result = searched(4, 8, 4)
    zero_bubble = ScheduleFigures(
        "zb", make_table("zero_bubble", ranks=4, microbatches=8), ScheduleCosts()
    )
    assert result.is_optimal
    assert result.best.makespan == zero_bubble.makespan == 27


def test_a_smaller_limit_is_never_faster() -> None:
    lengths = [searched(3, 4, limit).best.makespan for limit in (1, 2, 3)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4 * 7, "round trips of rank 0: 3 F, 3 I and its W"


@pytest.mark.slow
def test_4_ranks_and_8_micro_batches_are_solved_to_the_end() -> None:
    result = searched(4, 8, 3, chunks=(1, 2), seconds=60)
    assert result.is_optimal
    assert result.best.makespan == Fraction(53, 2)
    assert result.bound == Fraction(53, 2)


def test_what_is_too_large_for_the_program_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_search, "MAX_VARIABLES", 100)
    result = searched(3, 6, 2)
    (placement,) = result.placements
    assert placement.note.startswith("integer program of ")
    assert not result.is_optimal
    assert result.bound < result.best.makespan
    assert fits(result.best, result.request.limits)


def test_a_search_whose_time_is_over_keeps_a_table_and_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_search, "solve", lambda *_args, **_options: "not known")
    result = searched(3, 6, 2, seconds=1)
    assert "the time was over" in result.placements[0].note
    assert not result.is_optimal
    validate(result.best.table)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"limits": (Fraction(1, 2),) * 2}, "memory_limit: no table holds so few .* at least 1"),
        ({"limits": (Fraction(2),) * 3}, "memory_limit: another number of ranks"),
        ({"microbatches": 100_000}, "search: too large to be searched"),
    ],
)
def test_impossible_requests_are_rejected(changes: dict[str, object], line: str) -> None:
    fields = {"ranks": 2, "microbatches": 4, "limits": (Fraction(2),) * 2, **changes}
    with pytest.raises(ScheduleError, match=line):
        search(SearchRequest(**fields))


def test_without_scipy_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(program.importlib, "import_module", missing)
    with pytest.raises(ScheduleError, match=r"scipy, which is not installed\. Fix: pip install"):
        searched(2, 2, 2)
