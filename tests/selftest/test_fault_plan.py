"""Plans of injected faults: evenly spaced, seeded, and possible on their layout."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from weft_selftest.chaos.fault_plan import (
    FAULT_KINDS,
    FAULT_PHASES,
    MESSAGE_PHASES,
    PHASES_OF_KIND,
    STEP_GAP,
    Cell,
    cause_of_start,
    cells,
    deal,
    num_steps,
    plan_faults,
)

REPLICAS = (True, False, True)


def test_every_pair_of_kind_and_phase_is_injected_but_corrupted_messages_elsewhere_than_in_reductions():
    found = set(cells(FAULT_KINDS, FAULT_PHASES))
    num_others = len(FAULT_KINDS) - len(PHASES_OF_KIND)
    assert len(found) == num_others * 9 + len(MESSAGE_PHASES) + 1
    dealt = deal(len(FAULT_KINDS) * 9, finds_corruption=REPLICAS, seed=1)
    assert {cell for layout in dealt for cell in layout} == found


def test_faults_are_dealt_evenly_over_layouts_and_kinds_and_corrupted_messages_only_where_found():
    num_kinds = len(FAULT_KINDS)
    dealt = deal(9 * num_kinds, finds_corruption=REPLICAS, seed=3)
    kinds = Counter(kind for layout in dealt for kind, _ in layout)
    assert kinds.pop("full_disk_at_end") == len(REPLICAS), "a run has one end"
    assert set(kinds.values()) <= {9, 10}
    sizes = [len(layout) for layout in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert "corrupted_message" not in {kind for kind, _ in dealt[1]}
    nowhere = deal(2 * num_kinds, finds_corruption=[False], seed=3)
    actual = {kind for kind, _ in nowhere[0]}
    assert actual == set(FAULT_KINDS) - {"corrupted_message"}
    assert deal(9, kinds=["corrupted_message"], finds_corruption=[False], seed=3) == [[]]


def test_plans_are_functions_of_their_seed():
    (dealt,) = deal(40, finds_corruption=[True], seed=5)
    first = plan_faults(dealt, num_ranks=4, seed=5)
    assert first == plan_faults(dealt, num_ranks=4, seed=5)
    assert first != plan_faults(dealt, num_ranks=4, seed=6)


@pytest.mark.parametrize("seed", range(5))
def test_faults_are_apart_and_those_of_a_start_follow_one_that_ends_ranks(seed):
    (dealt,) = deal(60, finds_corruption=[True], seed=seed)
    faults = plan_faults(dealt, num_ranks=3, seed=seed)
    actual = sorted((fault.kind, fault.phase) for fault in faults)
    assert actual == sorted(dealt)
    assert [fault.number for fault in faults] == list(range(60))
    steps = [fault.step for fault in faults if fault.step]
    for earlier, later in itertools.pairwise(steps):
        assert later - earlier == STEP_GAP
    assert num_steps(faults) > steps[-1] + STEP_GAP
    for fault in faults[1:]:
        if fault.phase == "start":
            assert faults[fault.number - 1] == cause_of_start(fault, faults)


def test_all_faults_of_starts_are_planned_even_if_there_are_more_of_them_than_of_others():
    starts: list[Cell] = [
        ("kill", "start"),
        ("kill", "start"),
        ("clock", "start"),
        ("stop", "start"),
    ]
    faults = plan_faults([*starts, ("kill", "data")], num_ranks=2, seed=0)
    assert len(faults) == 5
    for one, other in itertools.pairwise(faults):
        assert (one.phase, one.rank) != (other.phase, other.rank)
