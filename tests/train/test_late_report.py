"""Reports that are read one step late: the same events, and no update of a step that is not finite, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spoiled_runs import bad_batch, events_of, run_of, spoil, words_of, write_text
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.load import load
from weft.core.axes import Box
from weft.errors import EXIT_FAILED, EXIT_OK
from weft.models import FAMILIES
from weft.models.common.batch import token_batch
from weft.testing import run_ranks
from weft.train import late_report
from weft.train.build_training import build_step
from weft.train.late_report import LateReports, reports_late

COMPARED = ("step", "guard", "eval", "resume")
TIMES = (
    "tokens_per_s",
    "step_s",
    "seconds",
    "mem_bytes",
    "stage_mem_bytes",
    "text",
    "path",
    "source",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def compared_events(out: Path) -> list[dict[str, Any]]:
    """Events of the training, without times and paths."""
    found = []
    for event in events_of(out):
        if event["event"] in COMPARED:
            found.append({key: event[key] for key in event if key not in TIMES})
    return found


def events_both_ways(
    text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, code: int = EXIT_OK
) -> list[dict[str, Any]]:
    """The events of a run, which are equal with and without late reports."""
    early = folder / "early"
    late = folder / "late"
    argv = ["train", *words_of(text, early, *words)]
    assert main(argv) == code
    monkeypatch.setattr(late_report, "LATE_DEVICES", frozenset({"cpu"}))
    assert main(["train", *words_of(text, late, *words)]) == code
    found = compared_events(late)
    assert found == compared_events(early)
    return found


@pytest.mark.parametrize(
    ("action", "code"),
    [
        pytest.param("skip", EXIT_OK, marks=pytest.mark.slow),
        pytest.param("rollback", EXIT_OK, marks=pytest.mark.slow),
        pytest.param("stop", EXIT_FAILED, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_finite_ends_as_without_late_reports(
    action, code, text, tmp_path, monkeypatch
):
    bad = bad_batch(run_of(text))
    spoil(monkeypatch, "layer1", torch.nan)
    words = ("--guard.nonfinite", action, "--steps", str(bad + 4), "--save.every", "2")
    found = events_both_ways(text, tmp_path, monkeypatch, *words, code=code)
    guards = [event for event in found if event["event"] == "guard"]
    actual = [(event["step"], event["action"]) for event in guards]
    assert actual == [(bad + 1, action)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "dp2", "--parallel.zero", "3", "--eval.every", "3"),
        ("--mesh", "pp2 tp2", "--guard.spike", "1.01"),
        ("--precision.compute", "bfloat16", "--save.every", "3"),
    ],
)
def test_events_are_the_same(words, text, tmp_path, monkeypatch):
    always = ("--steps", "8", "--eval.source", str(text))
    found = events_both_ways(text, tmp_path, monkeypatch, *always, *words)
    count = len([event for event in found if event["event"] == "step"])
    assert count == 8


def test_a_text_is_of_the_model_after_its_own_step(text, tmp_path, monkeypatch):
    words = ("--mesh", "dp2", "--steps", "6", "--sample", "8", "--sample_every", "2")
    events_both_ways(text, tmp_path, monkeypatch, *words)
    texts = [
        [(event["step"], event["text"]) for event in events_of(out) if event["event"] == "sample"]
        for out in (tmp_path / "early", tmp_path / "late")
    ]
    assert [step for step, _ in texts[0]] == [2, 4, 6]
    assert texts[0] == texts[1]


def test_a_step_whose_blocks_are_measured_is_not_late_and_those_around_it_are(
    text, tmp_path, monkeypatch
):
    words = ("--mesh", "dp2", "--steps", "7", "--log.blocks", "3", "--parallel.zero", "2")
    events_both_ways(text, tmp_path, monkeypatch, *words)
    measured = [
        [event for event in events_of(out) if event["event"] == "blocks"]
        for out in (tmp_path / "early", tmp_path / "late")
    ]
    assert [event["step"] for event in measured[0]] == [3, 6]
    assert measured[0] == measured[1]


def test_nothing_changes_from_the_first_step_that_is_not_finite_until_the_host_has_seen_it(
    monkeypatch,
):
    monkeypatch.setattr(late_report, "LATE_DEVICES", frozenset({"cpu"}))
    layout = "--mesh dp2 --parallel.zero 2 --batch.global_size 2 --batch.micro_size 1"
    tiny = "--model.layers 1 --model.dim 8 --model.heads 2 --model.kv_heads 1 --model.ffn 16"
    words = f"{layout} {tiny} --data.seq_len 8"
    run = load(words.split(), FAMILIES)

    def train(comm: Comm) -> None:
        step = build_step(run, comm)
        assert reports_late(step)
        late = LateReports(step)
        tokens = torch.arange(9).unsqueeze(0)
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        batches = [token_batch(inputs, targets)]

        def launch(number: int) -> Any:
            return late.launch(number, batches, lr=1e-2, status=lambda: 0, on_phase=None)

        def bits() -> list[torch.Tensor]:
            states = step.state().optimizer_state.values()
            tensors = [x for state in states for x in state.values()]
            params = step.grads.sharded_params.values()
            return [x.detach().clone() for x in (*params, *tensors)]

        assert late.read(launch(1)) is not None
        good = bits()
        weight = step.model.params["layer0.attn_norm.weight"]
        kept = weight.detach().clone()
        weight.data.fill_(torch.nan)  # of the copy that the model computes with
        bad = launch(2)
        weight.data.copy_(kept)
        following = launch(3)
        assert same_bits(bits(), good)
        assert late.read(bad) is None
        assert late.read(following) is not None, "finite, and left out"
        late.forget()
        assert late.read(launch(3)) is not None
        assert not same_bits(bits(), good)

    run_ranks("dp2", train)


def test_buffers_are_updated_as_without_late_reports(tmp_path, monkeypatch):
    resnet = Path(__file__).parents[1] / "user_models" / "resnet.py"
    words = "--batch.global_size 4 --batch.micro_size 2 --prove.before never --transport threads --steps 5"
    stored = []
    for name, devices in (("early", set()), ("late", {"cpu"})):
        monkeypatch.setattr(late_report, "LATE_DEVICES", frozenset(devices))
        out = tmp_path / name
        assert (
            main(["train", "--model.name", str(resnet), *words.split(), "--out", str(out)])
            == EXIT_OK
        )
        (checkpoint,) = (out / "ckpt").glob("step-*")
        tensors = open_checkpoint(checkpoint).section("model")
        names = [name for name in tensors.shapes if "running_mean" in name]
        assert names
        stored.append([tensors.read(name, Box.whole(tensors.shapes[name])) for name in names])
    assert same_bits(*stored)
