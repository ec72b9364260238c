"""Frozen linears in NF4 on any layout: what one device computes with matrices that were rounded by definition."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import save
from tests.matrix.layouts import LR, Case, batches, on_one_device, subject_of
from tests.one_device import check_records, micro_batches, one_device, records_of
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.state import write_items
from weft.comm.comm import Comm
from weft.config.lora import LORA_B, LORA_M
from weft.config.run import Run
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.models.common.lora import AdaptedFamily
from weft.prove.bounds import Bounds
from weft.prove.plain_nf4 import quantized_plainly
from weft.prove.subject import Subject
from weft.testing import run_ranks
from weft.train.build import family_of
from weft.train.build_training import build_step
from weft.train.step import TrainStep
from weft_selftest.mutants.plant import planted
from weft_selftest.mutants.quantized_faults import MUTANTS

LORA = LoraConfig(rank=3, alpha=5.0, quantize="nf4")
DOUBLE = LoraConfig(rank=3, alpha=5.0, quantize="nf4_double")
DORA = LoraConfig(rank=3, alpha=5.0, dora=True, targets=("q", "down"), quantize="nf4")
NUM_STEPS = 2
DIM = 96
"""A block and a half."""
TINY = {"layers": 2, "microbatches": 2}


@pytest.fixture(autouse=True)
def shaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters whose B is not zero at the start, so that every gradient has something to say."""
    right = AdaptedFamily.init
    rule = {f"*{LORA_B}": ("normal", 0.3), f"*{LORA_M}": ("normal", 0.3)}
    monkeypatch.setattr(AdaptedFamily, "init", lambda self, cfg: {**right(self, cfg), **rule})


def quantized_subject(case: Case, lora: LoraConfig = LORA) -> Subject:
    return subject_of(case, num_steps=NUM_STEPS, values={"lora": lora, "model.dim": DIM})


@cache
def truth(case: Case, lora: LoraConfig) -> Bounds:
    return one_device(quantized_subject(case, lora))


def check(case: Case, lora: LoraConfig = LORA) -> None:
    subject = quantized_subject(case, lora)
    check_records(subject, records_of(subject), truth(on_one_device(case), lora))


LAYOUTS = (
    Case("dp2", zero=3, **TINY),
    Case("tp2", family="gpt2", **TINY),
    Case("pp2 dp2 tp2", zero=1, **TINY),
    Case("cp2", **TINY),
)
MORE_LAYOUTS = (
    Case("dp2", **TINY),
    Case("tp2", sequence=True, recompute="full", **TINY),
    Case("pp2 dp2", zero=3, family="gpt2", recompute="selective", **TINY),
    Case("dp3 tp2", zero=3, grouped=True, **TINY),
    Case("pp2", schedule="zero_bubble", **TINY),
    Case("ep2", family="deepseek", **TINY),
)


@pytest.mark.parametrize(
    "case",
    [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_LAYOUTS)],
    ids=str,
)
def test_layout_computes_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [Case("tp2", **TINY), Case("dp2", zero=3, **TINY)], ids=str)
def test_magnitudes_extend_quantized_linears(case: Case) -> None:
    check(case, DORA)


@pytest.mark.parametrize(
    "case", [Case("tp2", **TINY), Case("dp3 tp2", zero=3, grouped=True, **TINY)], ids=str
)
def test_scales_in_8_bits_are_those_of_one_device(case: Case) -> None:
    check(case, DOUBLE)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_of_the_blocks_is_a_difference(mutant: object) -> None:
    case = Case("tp2", **TINY)
    right = truth(on_one_device(case), LORA)
    subject = quantized_subject(case)
    with planted(mutant):
        records = records_of(subject)
    with pytest.raises(AssertionError, match="weight as used is"):
        check_records(subject, records, right)


@pytest.mark.parametrize(("lora", "bits"), [(LORA, 4.5), (DOUBLE, 4 + 8 / 64 + 32 / 128)])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_holds_so_many_bits_of_each_frozen_weight(
    zero: int, lora: LoraConfig, bits: float
) -> None:
    """Lines of 128 entries: under double quantization a scale for both blocks of each."""
    case = Case("dp2", zero=zero, layers=2, microbatches=1)  # type: ignore[arg-type]
    widths = {"model.dim": 128, "model.ffn": 128, "lora": lora}

    def rank(comm: Comm) -> int:
        step = build_step(run_of(case, **widths), comm)
        groups = {id(group): group for group in step.grads.quantized.values()}
        return sum(tensor.nbytes for group in groups.values() for tensor in group.held)

    weights = sum(out * into for out, into in run_of(case, **widths).model.linears().values())
    num_bytes = bits / 8 * weights
    assert run_ranks(case.mesh, rank) == [num_bytes / (2 if zero else 1)] * 2


WRITER = Case("dp3", zero=3, layers=2, microbatches=1)
READERS = (
    WRITER,
    Case("", layers=2, microbatches=3),
    Case("pp2 tp2", sequence=True, layers=2, microbatches=3),
    Case("dp3 tp2", zero=1, layers=2, microbatches=1),
)


def run_of(case: Case, **updates: object) -> Run:
    return case.run.with_values({"lora": LORA, "model.dim": DIM, **updates})


def train(step: TrainStep, case: Case, index: int) -> tuple[float, float]:
    own = micro_batches(batches(case)[index], step.model.plan, step.model.comm.rank)
    report = step(own, lr=LR)
    return report.loss, report.grad_norm


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float]]:
    """A checkpoint behind two steps, and what the third one yields without stopping."""
    path = tmp_path_factory.mktemp("nf4") / "ckpt" / "step-000002"

    def rank(comm: Comm) -> tuple[float, float]:
        step = build_step(run_of(WRITER), comm)
        for index in range(2):
            train(step, WRITER, index)
        save(step, path, run_of(WRITER), done=2)
        return train(step, WRITER, 2)

    return path, run_ranks(WRITER.mesh, rank)[0]


@pytest.mark.parametrize("case", READERS, ids=str)
def test_a_run_continues_on_any_layout(
    case: Case, written: tuple[Path, tuple[float, float]]
) -> None:
    path, right = written

    def rank(comm: Comm) -> tuple[float, float]:
        step = build_step(run_of(case, seed=99), comm)
        checkpoint = open_checkpoint(path)
        step.restore(checkpoint)
        for piece in write_items(step.state()):
            section, _, name = piece.name.rpartition("/")
            stored = checkpoint.section(section).read(name, piece.box)
            assert torch.equal(piece.tensor, stored), piece.name
        return train(step, case, 2)

    for losses in run_ranks(case.mesh, rank):
        assert losses == (right if case == WRITER else pytest.approx(right, rel=1e-9))


def test_a_checkpoint_holds_bytes_and_reads_as_the_rounded_model(
    written: tuple[Path, tuple[float, float]],
) -> None:
    checkpoint = open_checkpoint(written[0])
    run = run_of(Case("", layers=2))
    family = family_of(run.model, LORA)
    model = checkpoint.section("model")
    names = {f"{linear}.weight" for linear in run.model.linears()}
    sections = {name: checkpoint.section(f"nf4/{name}").shapes for name in ("rows", "columns")}
    assert {*sections["rows"], *sections["columns"]} == names
    assert {name.rpartition(".attn.")[2] for name in sections["columns"] if "attn" in name} == {
        "o.weight"
    }
    for name in sorted(names):
        whole = Box.whole(model.shapes[name])
        value = model.read(name, whole)
        assert value.shape == run.model.linears()[name.removesuffix(".weight")]
        # what was rounded once is not rounded again
        assert torch.equal(quantized_plainly(name, value, family, run.model, quantize="nf4"), value)
        part = Box((3, 5), (20, 40))
        assert torch.equal(model.read(name, part), value[3:20, 5:40])
