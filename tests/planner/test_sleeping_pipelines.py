"""Simulated bubbles against real pipelines of four ranks as threads, whose stages sleep as long as they should compute."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.parallel.test_player import chain_of_layers, micro_batches, plan_of
from weft.comm.comm import Comm
from weft.parallel.model.parallelize import parallelize
from weft.parallel.pipeline.player import Player, StepState
from weft.planner.simulate.pipeline_time import ClassCosts, StageMessage, pipeline_order, play
from weft.planner.simulate.region_costs import Compute, RegionCosts
from weft.schedule.actions import Act
from weft.schedule.simulate import UNIT_COSTS
from weft.schedule.timeline import COMPUTE, Span, Timeline, bubble, makespan
from weft.testing import run_ranks

RANKS, MICROBATCHES, STAGES = 4, 8, 8
FORWARD_S = 0.05
"""Of a stage of a schedule with one chunk a rank: some hundred times the work of the player."""
MOST_POINTS = 0.05

pytestmark = pytest.mark.slow


def seconds_of(act: Act, num_stages: int) -> float:
    """Odd stages take a third longer than even ones."""
    chunks = num_stages // RANKS
    longer = 4 / 3 if act.stage % 2 else 1.0
    return FORWARD_S * UNIT_COSTS[act.kind] * longer / chunks


class SleepingPlayer(Player):
    """A player whose actions take the seconds that they are said to take."""

    num_stages = STAGES

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spans: list[tuple[Act, float, float]] = []

    def _run_action(self, state: StepState, act: Act) -> None:
        source = self.table.source(act)
        if source in state.recvs:  # its wait is no work: wait, and hand the tensor on
            state.outputs[source] = state.recvs.pop(source).wait()
        start = time.perf_counter()
        super()._run_action(state, act)
        end = start + seconds_of(act, self.table.num_stages)
        time.sleep(max(0.0, end - time.perf_counter()))
        self.spans.append((act, start, time.perf_counter()))


def real_timeline(schedule: str) -> Timeline:
    batches = micro_batches(MICROBATCHES)

    def rank(comm: Comm) -> list[Span]:
        plan = plan_of(schedule, f"pp{RANKS}", MICROBATCHES, layers=STAGES)
        model = parallelize(chain_of_layers(("",) * STAGES), plan, comm)
        player = SleepingPlayer(model, before_last_backward=lambda stage: None)
        for _ in range(2):  # the first step loads code
            player.spans.clear()
            comm.barrier("pp")
            player.play(batches, torch.tensor(1.0))
        spans = []
        for act, start, end in player.spans:
            spans.append(Span(comm.rank, str(act), act.kind, start, end))
        return spans

    spans = [span for rank_spans in run_ranks(f"pp{RANKS}", rank) for span in rank_spans]
    return Timeline(tuple(spans), RANKS, "measured")


def predicted(schedule: str) -> tuple[float, float]:
    """Bubble and seconds of the simulation."""
    table = plan_of(schedule, f"pp{RANKS}", MICROBATCHES, layers=STAGES).table
    order = pipeline_order(table)
    costs = []
    for action_class in order.classes:
        act = Act(action_class.key.kind, action_class.stage, 0)  # type: ignore[arg-type]
        seconds = seconds_of(act, table.num_stages)
        region = RegionCosts((Compute(seconds),), (), seconds, frozenset(), seconds)
        has_peer = action_class.peer is not None
        message = StageMessage("node", 0.0) if has_peer else None
        costs.append(ClassCosts(region, message))
    played = play(order, costs)
    busy = sum(region_time.total for region_time in played.times)
    seconds = max(played.last_end)
    return 1 - busy / seconds / RANKS, seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_the_simulated_bubble_is_that_of_a_real_pipeline(schedule: str) -> None:
    expected_bubble, expected_s = predicted(schedule)
    measured = real_timeline(schedule)
    measured_bubble = bubble(measured.only(kinds=COMPUTE))
    assert measured_bubble == pytest.approx(expected_bubble, abs=MOST_POINTS)
    assert makespan(measured) >= 0.99 * expected_s
