"""Saving and restoring a training step: each entry is written once, the work is shared, mismatches are rejected."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import save
from tests.matrix.layouts import LR, Case, batches, shallow
from tests.one_device import micro_batches
from weft.checkpoint.coverage import coverage_flaw
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.restore import load_model, load_parameters
from weft.checkpoint.state import write_items
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.config.schema import OptimConfig, PrecisionConfig
from weft.core.axes import Box
from weft.errors import CheckpointError
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.build_training import build_step
from weft.train.optimizers.elementwise import SGD
from weft.train.step import TrainStep

CASES = (
    Case("dp3", family="gpt2"),
    Case("pp2 tp2", grouped=True, sequence=True),
    Case("pp2 dp2", family="gpt2", schedule="interleaved", chunks=2),
    Case("dp2 tp2", family="gpt2", zero=1),
    Case("dp2 cp2", family="deepseek", zero=2),
    Case("ep2 tp2", family="deepseek", zero=3),
    Case("tp4 dp2", family="gpt2", zero=3),  # cuts positions behind unequal parts of the vocabulary
)


def run_of(case: Case, **updates: object) -> Run:
    return case.run.model_copy(update=updates)


def trained(run: Run, case: Case, comm: Comm, *, steps: int = 1) -> TrainStep:
    step = build_step(run, comm)
    for batch in batches(case)[:steps]:
        step(micro_batches(batch, step.model.plan, comm.rank), lr=LR)
    return step


@pytest.mark.parametrize("case", [shallow(case) for case in CASES], ids=str)
def test_every_entry_is_written_by_one_rank(case):
    def rank(comm: Comm) -> list[tuple[str, tuple[int, ...], Box]]:
        step = build_step(run_of(case), comm)
        pieces = write_items(replace(step.state(), min_shared_entries=64))
        return [(piece.name, piece.shape, piece.box) for piece in pieces]

    shapes = {}
    boxes = {}
    for pieces in run_ranks(case.mesh, rank):
        for name, shape, box in pieces:
            shapes[name] = shape
            boxes.setdefault(name, []).append(box)
    assert {name.split("/")[0] for name in shapes} == {"model", "optim"}
    for name, shape in shapes.items():
        assert coverage_flaw(Box.whole(shape), boxes[name]) is None, name


def test_a_tied_parameter_is_stored_once_under_its_owners_name():
    case = Case("pp2", grouped=True)  # embedding on the first rank, head on the last

    def rank(comm: Comm) -> list[str]:
        step = build_step(run_of(case), comm)
        return [piece.name for piece in write_items(step.state())]

    first, last = run_ranks(case.mesh, rank)
    assert "model/embed.tok.weight" in first
    for name in last:
        assert "head.weight" not in name
        assert "embed" not in name


def test_ranks_that_hold_copies_share_the_work():
    def rank(comm: Comm) -> int:
        step = build_step(run_of(Case("dp4")), comm)
        pieces = write_items(replace(step.state(), min_shared_entries=256))
        return sum(piece.num_bytes for piece in pieces)

    sizes = run_ranks("dp4", rank)
    assert max(sizes) < 1.3 * sum(sizes) / 4


def test_small_tensors_are_written_whole_and_by_different_ranks():
    def rank(comm: Comm) -> Counter[str]:
        return Counter(
            piece.name for piece in write_items(build_step(run_of(Case("dp4")), comm).state())
        )

    counts = run_ranks("dp4", rank)
    for names in counts:
        for count in names.values():
            assert count == 1
    assert all(counts)


def test_the_router_bias_has_no_optimizer_state_and_is_stored():
    case = Case("dp2", family="deepseek")
    ranks = run_ranks(
        "dp2",
        lambda comm: [piece.name for piece in write_items(build_step(run_of(case), comm).state())],
    )
    about = {
        name.split("/")[0] for names in ranks for name in names if name.endswith("router.bias")
    }
    assert about == {"model"}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_masters_are_stored_and_compute_copies_follow_them(zero, tmp_path):
    case = Case("dp2", zero=zero)
    mixed = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    run = run_of(case, precision=mixed)

    def rank(comm: Comm) -> list[bool]:
        step = trained(run, case, comm)
        save(step, tmp_path / "step-000001", run)
        other = build_step(run.model_copy(update={"seed": 99}), comm)
        other.restore(open_checkpoint(tmp_path / "step-000001"))
        batch = micro_batches(batches(case)[1], step.model.plan, comm.rank)
        one = step(batch, lr=LR)
        two = other(batch, lr=LR)
        return [one.loss == two.loss, one.grad_norm == two.grad_norm]

    assert run_ranks("dp2", rank) == [[True, True]] * 2
    stored = open_checkpoint(tmp_path / "step-000001").manifest.tensors
    assert {tensor.dtype for tensor in stored.values()} == {"float32"}


def test_the_loss_scale_comes_back(tmp_path):
    case = Case("", family="gpt2")
    run = run_of(
        case, precision=PrecisionConfig(params="float32", compute="float16", reduce="float32")
    )

    def rank(comm: Comm) -> tuple[object, object]:
        step = trained(run, case, comm)
        step.loss_scale = replace(step.loss_scale, value=2.0**9, good_steps=17)
        save(step, tmp_path / "step-000001", run)
        other = build_step(run, comm)
        other.restore(open_checkpoint(tmp_path / "step-000001"))
        return step.loss_scale, other.loss_scale

    ((mine, restored),) = run_ranks("", rank)
    assert mine == restored


def refusal(case: Case, saved: Run, other: Run, folder: Path) -> str:
    """What all ranks say of a checkpoint of `saved` in a run of `other`."""
    path = folder / "step-000000"

    def rank(comm: Comm) -> str:
        written = build_step(saved, comm)
        save(written, path, saved)
        step = build_step(other, comm)
        checkpoint = open_checkpoint(path)
        with pytest.raises(CheckpointError) as error:
            step.restore(checkpoint)
        return str(error.value)

    told = run_ranks(case.mesh, rank)
    assert all(told)
    return told[0]


def test_another_optimizer_is_rejected_by_its_state(tmp_path):
    case = Case("dp2", family="gpt2")
    told = refusal(case, run_of(case), run_of(case, optim=OptimConfig(name="sgd")), tmp_path)
    assert re.search(r"other state \(got exp_avg, exp_avg_sq, step; need momentum_buffer\)", told)


def test_another_type_of_parameters_is_rejected(tmp_path):
    case = Case("pp2", family="gpt2")
    told = refusal(case, run_of(case), run_of(case, precision=PrecisionConfig()), tmp_path)
    assert (
        "is stored in another dtype (got float64; need float32). Fix: --precision.params float64"
        in told
    )


def test_missing_and_additional_tensors_are_named(tmp_path):
    deep = Case("pp2", layers=4)
    flat = Case("pp2", layers=3)
    assert "model/layer3." in refusal(flat, deep.run, flat.run, tmp_path / "more")
    assert "model/layer3." in refusal(flat, flat.run, deep.run, tmp_path / "less")


def test_another_shape_is_named(tmp_path):
    case = Case("tp2", family="gpt2")
    wide_model = case.run.model.model_copy(update={"ffn": 64})
    wide = case.run.model_copy(update={"model": wide_model})
    told = refusal(case, case.run, wide, tmp_path)
    assert re.search(r"model/layer0\.mlp\S+: is stored with another shape", told)


def test_what_one_rank_finds_damaged_all_ranks_raise(tmp_path):
    case = Case("dp2 tp2", zero=3)

    def rank(comm: Comm) -> str:
        step = build_step(case.run, comm)
        save(step, tmp_path / "step-000000", case.run)
        if comm.rank == 0:
            path = tmp_path / "step-000000" / "rank-00002.safetensors"
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
        comm.barrier(("dp", "tp"))
        with pytest.raises(CheckpointError) as error:
            step.restore(open_checkpoint(tmp_path / "step-000000"))
        return str(error.value)

    for told in run_ranks(case.mesh, rank):
        assert "rank-00002.safetensors" in told


def test_a_model_without_a_trainer_and_a_start_from_parameters_alone(tmp_path):
    saved = Case("pp2 tp2", family="gpt2")
    other = Case("dp2 tp2", family="gpt2", zero=3)

    def write(comm: Comm) -> None:
        save(trained(saved.run, saved, comm), tmp_path / "step-000001", saved.run)

    def read(comm: Comm) -> bool:
        source = open_checkpoint(tmp_path / "step-000001").section("model")
        step = build_step(other.run, comm)
        load_parameters(step.state(), source)
        plan = other.plan.model_copy(update={"zero": 0})
        model = build_model(FAMILIES["gpt2"], other.config, plan, comm, seed=7)
        load_model(model, source)
        found = step.grads.full_parameters()
        return all(torch.equal(param, found[name]) for name, param in model.params.items())

    run_ranks(saved.mesh, write)
    assert all(run_ranks(other.mesh, read))


def test_sgd_with_and_without_momentum(tmp_path):
    case = Case("dp2", zero=1)
    for momentum, sections in ((0.9, ("model", "optim/momentum_buffer")), (0.0, ("model",))):
        run = run_of(case, optim=OptimConfig(name="sgd", momentum=momentum))
        final = tmp_path / f"{momentum}" / "step-000001"

        def rank(comm: Comm, run: Run = run, final: Path = final) -> bool:
            step = trained(run, case, comm)
            for group in step.optimizer.groups:
                assert isinstance(group.rule, SGD)
            save(step, final, run)
            other = build_step(run, comm)
            other.restore(open_checkpoint(final))
            batch = micro_batches(batches(case)[1], step.model.plan, comm.rank)
            return step(batch, lr=LR).loss == other(batch, lr=LR).loss

        assert all(run_ranks(case.mesh, rank))
        assert open_checkpoint(final).sections == sections
