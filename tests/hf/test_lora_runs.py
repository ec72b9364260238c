"""Runs with adapters: resumed under any layout, started from another run, exported both ways, rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.saving import save
from tests.matrix.layouts import LR, Case, batches
from tests.one_device import micro_batches
from tests.tiny_run import TINY
from weft.checkpoint.read import Checkpoint, open_checkpoint
from weft.checkpoint.state import write_items
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.lora import adapted_linear
from weft.config.run import Run
from weft.config.schema import LoraConfig, PrecisionConfig
from weft.core.axes import Box
from weft.errors import EXIT_OK, EXIT_USER
from weft.hf.adapters import merge_adapters
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.step import TrainStep

LORA = LoraConfig(rank=2, alpha=6.0)
MIXED = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
SMALL: dict[str, Any] = {"layers": 2, "microbatches": 1}
WRITER = Case("dp3", zero=3, **SMALL)
READERS = (
    WRITER,
    Case("", layers=2, microbatches=3),
    Case("pp2 tp2", sequence=True, layers=2, microbatches=3),
    Case("dp3 tp2", zero=1, **SMALL),
)


def run_of(case: Case, **updates: object) -> Run:
    return case.run.model_copy(update={"lora": LORA, **updates})


def train(step: TrainStep, case: Case, index: int) -> tuple[float, float]:
    batch = batches(case)[index]
    own = micro_batches(batch, step.model.plan, step.model.comm.rank)
    report = step(own, lr=LR)
    return report.loss, report.grad_norm


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float]]:
    """A checkpoint behind two steps, and what the third one yields without stopping."""
    path = tmp_path_factory.mktemp("lora") / "ckpt" / "step-000002"

    def rank(comm: Comm) -> tuple[float, float]:
        step = build_step(run_of(WRITER), comm)
        for index in range(2):
            train(step, WRITER, index)
        save(step, path, run_of(WRITER), done=2)
        return train(step, WRITER, 2)

    return path, run_ranks(WRITER.mesh, rank)[0]


@pytest.mark.parametrize("case", READERS, ids=str)
def test_it_continues_on_any_layout(case: Case, written: tuple[Path, tuple[float, float]]) -> None:
    path, right = written

    def rank(comm: Comm) -> tuple[float, float]:
        step = build_step(run_of(case, seed=99), comm)
        checkpoint = open_checkpoint(path)
        step.restore(checkpoint)
        for piece in write_items(step.state()):
            section, _, name = piece.name.rpartition("/")
            assert torch.equal(piece.tensor, checkpoint.section(section).read(name, piece.box)), (
                piece.name
            )
        return train(step, case, 2)

    for losses in run_ranks(case.mesh, rank):
        assert losses == (right if case == WRITER else pytest.approx(right, rel=1e-9))


def test_optimizer_state_is_stored_of_adapters_alone(
    written: tuple[Path, tuple[float, float]],
) -> None:
    tensors = open_checkpoint(written[0]).manifest.tensors
    assert {adapted_linear(name) is not None for name in tensors if name.startswith("optim/")} == {
        True
    }
    assert {adapted_linear(name) is not None for name in tensors if name.startswith("model/")} == {
        True,
        False,
    }


@pytest.mark.parametrize(
    "case", [Case("dp2", layers=2), Case("tp2", layers=2), Case("dp2", zero=3, layers=2)], ids=str
)
def test_new_adapters_extend_a_base_that_old_ones_were_merged_into(
    case: Case, written: tuple[Path, tuple[float, float]]
) -> None:
    """The base is the merged model, under any layout; new adapters are nothing yet."""
    path, _ = written
    lora = LoraConfig(rank=3, base=str(path))
    run = run_of(case, lora=lora)

    def rank(comm: Comm) -> None:
        step = build_step(run, comm)
        old = merge_adapters(open_checkpoint(path).section("model"), LORA)
        for piece in write_items(step.state()):
            section, _, name = piece.name.rpartition("/")
            if section == "model" and adapted_linear(name) is None:
                assert torch.equal(piece.tensor, old.read(name, piece.box)), name
            elif section == "model":
                assert piece.tensor.any() == name.endswith("lora_a.weight")

    run_ranks(case.mesh, rank)


@pytest.mark.parametrize("zero", [0, 3])
def test_the_base_is_stored_in_the_type_of_compute(zero: int, tmp_path: Path) -> None:
    case = Case("dp2", zero=zero, **SMALL)  # type: ignore[arg-type]
    run = run_of(case, precision=MIXED)

    def rank(comm: Comm) -> bool:
        step = build_step(run, comm)
        train(step, case, 0)
        save(step, tmp_path / "step-000001", run)
        other = build_step(run.model_copy(update={"seed": 99}), comm)
        other.restore(open_checkpoint(tmp_path / "step-000001"))
        return train(step, case, 1) == train(other, case, 1)

    assert run_ranks(case.mesh, rank) == [True, True]
    for name, stored in open_checkpoint(tmp_path / "step-000001").manifest.tensors.items():
        frozen = name.startswith("model/") and adapted_linear(name) is None
        assert stored.dtype == ("bfloat16" if frozen else "float32"), name


def test_commands_from_a_base_to_both_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(tmp_path / "base")
    out = str(tmp_path / "out")
    short = (*TINY, "--steps", "2", "--save.every", "2")
    assert main(["train", *short, "--out", base]) == EXIT_OK
    adapters = ("--lora.rank", "2", "--lora.alpha", "4", "--lora.targets", "q", "down")
    assert (
        main(["train", *short, "--out", out, *adapters, "--lora.base", base, "--mesh", "tp2"])
        == EXIT_OK
    )
    argv = ["export", out, str(tmp_path / "adapters"), "--adapters", "True"]
    assert main(argv) == EXIT_OK
    assert main(["export", out, str(tmp_path / "merged"), "--compare", "False"]) == EXIT_OK
    capsys.readouterr()
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert config["lora_alpha"] == 4
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    first, last = (newest(Path(each)) for each in (base, out))
    for name, shape in first.section("model").shapes.items():
        whole = Box.whole(shape)
        assert torch.equal(
            last.section("model").read(name, whole), first.section("model").read(name, whole)
        ), name
    for words, message in (
        (("--lora.alpha", "8"), "error: lora.alpha: differs from the checkpoint"),
        (("--lora.targets", "q"), "error: lora.targets: differs from the checkpoint"),
    ):
        assert rejected(["train", *short, *adapters, "--resume", out, *words], capsys).startswith(
            message
        )
    for words, message in (
        (("--lora.rank", "2", "--lora.base", base, "--model.dim", "32"), "error: lora.base: "),
        (
            ("--lora.base", base),
            "error: lora.rank: is 0, no adapters, but lora.base names their base model",
        ),
        (("--lora.rank", "2", "--lora.base", str(tmp_path)), "error: lora.base: "),
        (("--lora.rank", "2", "--lora.base", "auto"), "error: lora.base: names no run: auto"),
    ):
        assert rejected(["train", *short, *words], capsys).startswith(message)
    assert rejected(
        ["export", base, str(tmp_path / "none"), "--adapters", "True"], capsys
    ).endswith(
        "has no adapters to write. Fix: export the model itself, or train with --lora.rank 8"
    )


def newest(out: Path) -> Checkpoint:
    return open_checkpoint(max((out / "ckpt").glob("step-*")))


def rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on its only line."""
    assert main(words) == EXIT_USER
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lora.rank", "-1"), "error: lora.rank: out of range (got -1"),
        (
            ("--lora.rank", "17"),
            "error: lora.rank: is larger than the smaller side of layer0.attn.q, which has 16 features",
        ),
        (
            ("--lora.rank", "2", "--lora.alpha", "0"),
            "error: lora.alpha: out of range (got 0.0; need a number, above 0)",
        ),
        (
            ("--lora.rank", "2", "--lora.targets", "qq"),
            "error: lora.targets: no linear of llama3 has this name (got 'qq')",
        ),
        (("--lora.rank", "2", "--lora.targets", "q", "gates"), "Fix: did you mean 'gate'?"),
        (
            ("--lora.targets", "q"),
            "error: lora.rank: is 0 (no adapters), and lora.targets names some",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_reported_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    actual = rejected(["train", *TINY, "--out", str(tmp_path / "out"), *words], capsys)
    assert message in actual


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model.name", "mnist"),
            "mnist has no attention or feed-forward projections that adapters can extend",
        ),
        (
            ("--model.name", "deepseek", "--lora.targets", "experts"),
            "Fix: routed experts take no adapters; these do: down",
        ),
    ],
)
def test_models_without_such_linears_are_rejected(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert message in rejected(
        ["train", "--lora.rank", "2", "--out", str(tmp_path / "out"), *words], capsys
    )
