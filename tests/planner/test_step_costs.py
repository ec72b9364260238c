"""Memory, FLOPs and traffic that are measured on the meta device equal those of a real step, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.observe import Counter as TrafficCounter
from weft.config.load import load
from weft.config.run import Run, plan_of
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.planner import rank_step
from weft.planner.rank_step import RankStep, measure_rank, record_step
from weft.planner.step_memory import step_memory
from weft.planner.step_traffic import step_traffic
from weft.testing import run_ranks
from weft.train.build import build_step

LAYOUTS = {
    "one rank": "",
    "dp2": "--mesh dp2 --batch.global_size 4",
    "dp2 zero1": "--mesh dp2 --parallel.zero 1",
    "dp2 zero2": "--mesh dp2 --parallel.zero 2",
    "dp2 zero3": "--mesh dp2 --parallel.zero 3",
    "tp2 sequence": "--mesh tp2 --parallel.sequence True",
    "cp2": "--mesh cp2",
    "pp2 1f1b": "--mesh pp2 --batch.global_size 6",
    "pp2 zbv": "--mesh pp2 --pipeline.schedule zbv --batch.global_size 4",
    "pp2 dp2 zero1": "--mesh pp2,dp2 --parallel.zero 1",
    "pp2 tp2 full recompute": "--mesh pp2,tp2 --parallel.recompute full",
    "dp2 zero3 selective bfloat16": "--mesh dp2 --parallel.zero 3 --parallel.recompute selective --precision.compute bfloat16",
}
SMALL = (
    "--model.layers 4 --model.dim 32 --model.heads 4 --model.kv_heads 2 --model.ffn 48 --data.seq_len 16"
    " --batch.micro_size 1 --device cpu"
)


ACTIONS = slice(1, -1)
"""Levels of the actions and the reduction. Before them numbers of every micro-batch are stacked;
after the update a few numbers of the report are freed now or later.
"""


def run_of(flags: str) -> Run:
    words: list[str] = []
    for word in flags.split():
        words.append(word.replace(",", " "))
    text = words if "--batch.global_size" in words else [*words, "--batch.global_size", "8"]
    return load([*text, *SMALL.split()], FAMILIES)


def real_batches(run: Run, comm: Comm) -> list[Batch]:
    plan = plan_of(run)
    on_meta = rank_step.example_batch(run, plan, comm)
    batch = on_meta.map(lambda x: torch.ones(x.shape, dtype=x.dtype))
    return [batch] * plan.microbatches


def real_steps(run: Run) -> Sequence[tuple[RankStep, TrafficCounter]]:
    def rank(comm: Comm) -> tuple[RankStep, TrafficCounter]:
        step = build_step(run, comm)
        batches = real_batches(run, comm)
        recorded = record_step(step, batches, table=plan_of(run).table)
        counter = TrafficCounter()
        comm.observers = (counter,)
        step(batches, lr=1.0)
        return recorded, counter

    return run_ranks(run.mesh, rank)


def slow_but(*names: str) -> list[Any]:
    """All layouts; those that are not named are marked slow."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS
    ]


@pytest.mark.parametrize(
    "name", slow_but("one rank", "pp2 zbv", "pp2 dp2 zero1", "dp2 zero3 selective bfloat16")
)
def test_the_meta_device_shows_what_a_real_step_does(name: str) -> None:
    run = run_of(LAYOUTS[name])
    for rank, (real, counter) in enumerate(real_steps(run)):
        predicted = measure_rank(run, rank)
        row = real.row
        assert predicted.kept == real.kept
        levels = step_memory(predicted, row).levels[ACTIONS]
        real_levels = step_memory(real, row).levels[ACTIONS]
        if run.pipeline.schedule == "zbv":  # a split backward has a scalar on the host
            assert [level.name for level in levels] == [level.name for level in real_levels]
            for level, real_level in zip(levels, real_levels, strict=True):
                assert level.held == pytest.approx(real_level.held, abs=64)
                assert level.most == pytest.approx(real_level.most, abs=64)
        else:
            assert levels == real_levels
        assert step_traffic(predicted, row) == counter.traffic
        flops = Counter({key: region.flops for key, region in predicted.actions.items()})
        for key, region in real.actions.items():
            if key in flops:
                assert flops[key] == region.flops, key


@pytest.mark.parametrize("name", ["pp2 1f1b", pytest.param("dp2 zero3", marks=pytest.mark.slow)])
def test_three_micro_batches_stand_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of eight micro-batches, of which three are played, has the levels and traffic of all
    eight.
    """
    flags = LAYOUTS[name].replace("--batch.global_size 6", "")
    run = run_of(f"{flags} --batch.global_size 16")
    for rank in range(run.device_mesh.size):
        short = measure_rank(run, rank)
        monkeypatch.setattr(rank_step, "MOST_PLAYED", 99)
        whole = measure_rank(run, rank)
        monkeypatch.undo()
        assert (
            step_memory(short, short.row).levels[ACTIONS]
            == step_memory(whole, whole.row).levels[ACTIONS]
        )
        assert step_traffic(short, short.row) == step_traffic(whole, whole.row)
