"""Optimizer states: restored bit for bit on the same layout, moved between layouts, rejected by another optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.saving import save
from tests.matrix.layouts import LR, Case, batches
from tests.one_device import micro_batches
from weft.checkpoint.folder import FOLDER
from weft.checkpoint.read import open_checkpoint
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.config.schema import OptimConfig, OptimGroup
from weft.errors import CheckpointError
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.optim import NamedOptimizer
from weft.train.run_start import StartState, restore_newest
from weft.train.step import TrainStep

SMALL = {"layers": 2, "microbatches": 2}
ZERO_3 = Case("dp2 tp2", zero=3, **SMALL)
PIPELINE = Case("pp2", layers=2, microbatches=4)
OPTIMS = {
    "muon": OptimConfig(name="muon", groups=(OptimGroup(match="*mlp.up*", optimizer="lion"),)),
    "adafactor": OptimConfig(name="adafactor"),
    "lion": OptimConfig(name="lion"),
    "8 bits": OptimConfig(state_dtype="8bit", state_block=10),
}
FINAL = "step-000001"


def run_of(case: Case, optim: OptimConfig) -> Run:
    return case.run.model_copy(update={"optim": optim})


def advance(step: TrainStep, case: Case, number: int) -> None:
    batch = batches(case)[number]
    step(micro_batches(batch, step.model.plan, step.model.comm.rank), lr=LR)


def write(folder: Path, case: Case, optim: OptimConfig) -> list[dict[str, Tensor]]:
    """Save after one step; parameters after the second one."""

    def rank(comm: Comm) -> dict[str, Tensor]:
        step = build_step(run_of(case, optim), comm)
        advance(step, case, 0)
        save(step, folder / FINAL, run_of(case, optim))
        advance(step, case, 1)
        return step.grads.full_parameters()

    return run_ranks(case.mesh, rank)


def resume(folder: Path, case: Case, optim: OptimConfig) -> list[dict[str, Tensor]]:
    def rank(comm: Comm) -> dict[str, Tensor]:
        step = build_step(run_of(case, optim), comm)
        step.restore(open_checkpoint(folder / FINAL))
        advance(step, case, 1)
        return step.grads.full_parameters()

    return run_ranks(case.mesh, rank)


@pytest.mark.parametrize("name", OPTIMS)
def test_a_resume_on_the_same_layout_is_exact_and_on_another_one_equal(
    name: str, tmp_path: Path
) -> None:
    optim = OPTIMS[name]
    right = write(tmp_path, ZERO_3, optim)
    for found, expected in zip(resume(tmp_path, ZERO_3, optim), right, strict=True):
        for key, value in expected.items():
            assert torch.equal(found[key], value)
    case = Case("", layers=2, microbatches=4)
    whole = resume(tmp_path, case, optim)[0]
    for tensors in resume(tmp_path, PIPELINE, optim):
        for key, value in tensors.items():
            torch.testing.assert_close(value, whole[key], rtol=1e-9, atol=1e-12)


def restored(folder: Path, case: Case, optim: OptimConfig) -> list[tuple[dict[str, Tensor], float]]:
    """Parameters, and the largest entry of any state, after a start as `weft train` makes it."""

    def rank(comm: Comm) -> tuple[dict[str, Tensor], float]:
        run = run_of(case, optim)
        step = build_step(run, comm)
        recorded = run.optim.model_dump(mode="json")
        start_state = StartState(open_checkpoint(folder / FINAL))
        start_state.restore(step, recorded)
        return step.grads.full_parameters(), largest_state(step)

    return run_ranks(case.mesh, rank)


def largest_state(step: TrainStep) -> float:
    """The largest entry of any optimizer state here."""
    assert isinstance(step.optimizer, NamedOptimizer)
    entries = []
    for state in step.optimizer.state.values():
        for x in state.values():
            if x.numel():
                entries.append(float(x.abs().max()))
    return max(entries)


def test_a_rollback_to_a_checkpoint_of_another_optimizer_begins_with_fresh_state(
    tmp_path: Path,
) -> None:
    """Momentum of the steps that are taken back would be that of other parameters."""
    sgd = OptimConfig(name="sgd")
    write(tmp_path / FOLDER, ZERO_3, OptimConfig(name="lion"))
    optim = sgd.model_copy(update={"on_change": "fresh"})

    def rank(comm: Comm) -> None:
        step = build_step(run_of(ZERO_3, optim), comm)
        recorded = optim.model_dump(mode="json")
        StartState(open_checkpoint(tmp_path / FOLDER / FINAL)).restore(step, recorded)
        before = step.grads.full_parameters()
        advance(step, ZERO_3, 1)
        assert largest_state(step) > 0
        restore_newest(step, tmp_path, recorded)
        assert largest_state(step) == 0
        for name, value in step.grads.full_parameters().items():
            assert torch.equal(value, before[name])

    run_ranks(ZERO_3.mesh, rank)


def test_another_optimizer_is_rejected_or_begins_with_fresh_state(tmp_path: Path) -> None:
    lion = OptimConfig(name="lion")
    write(tmp_path, ZERO_3, lion)
    with pytest.raises(CheckpointError, match=r"another optimizer .* --optim\.on_change fresh"):
        restored(tmp_path, ZERO_3, OptimConfig(name="adamw"))
    fresh = OptimConfig(name="adamw", on_change="fresh")
    for parameters, largest in restored(tmp_path, ZERO_3, fresh):
        assert largest == 0.0
        assert parameters
    same = OptimConfig(name="lion", on_change="fresh")
    for _, largest in restored(tmp_path, ZERO_3, same):
        assert largest > 0
