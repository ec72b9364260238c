"""The best checkpoint is kept and found by name; training stops early, and says so."""

from __future__ import annotations

import json
import os

import pytest

from tests.tiny_run import TINY
from weft.checkpoint.folder import best_step, checkpoints
from weft.cli import main
from weft.config.load import load
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.best import EvalHistory
from weft.train.build_training import build_training
from weft.train.event_lines import read_run_events
from weft.train.event_log import EVENTS, EventLog
from weft.train.loop import run_training

TEXT = "the cat sat on the mat and the dog sat on the log\n" * 5


def trained(out, words, losses):
    """The events of a run whose evaluations find these losses, one after the other."""
    (out.parent / "t.txt").write_text(TEXT)
    source = [
        "--data.source",
        str(out.parent / "t.txt"),
        "--eval.source",
        str(out.parent / "t.txt"),
    ]
    argv = [*TINY, *source, "--out", str(out), "--eval.every", "1", *words.split()]
    run = load(argv, FAMILIES)
    os.makedirs(out, exist_ok=True)

    def rank(comm):
        training = build_training(run, comm, stop_requested=lambda: False)
        evaluation = training.evaluator.evaluation
        evaluate = type(evaluation).__call__
        reports = iter(losses)

        class Scripted(type(evaluation)):
            def __call__(self):
                report = evaluate(self)
                return type(report)(loss=next(reports), targets=report.targets, seconds=0.0)

        evaluation.__class__ = Scripted
        with EventLog(out if comm.rank == 0 else None) as log:
            run_training(training, log)

    run_ranks(run.device_mesh, rank)
    return list(read_run_events(out / EVENTS))


def test_the_history_counts_evaluations_since_the_lowest_loss():
    history = EvalHistory(patience=2)
    assert [history.add(step, loss) for step, loss in [(1, 3.0), (2, float("nan")), (3, 2.0)]] == [
        True,
        False,
        True,
    ]
    assert not history.is_exhausted
    assert not history.add(4, 2.0)
    assert not history.add(5, 2.5)
    assert history.is_exhausted
    history.forget_above(4)
    assert not history.is_exhausted


def test_the_best_checkpoint_survives_and_is_found_by_name(tmp_path, capsys):
    out = tmp_path / "run"
    losses = [3.0, 1.5, 2.0, 2.5, 2.6]
    words = "--steps 5 --save.every 1 --save.keep 1 --save.best True"
    events = trained(out, words, losses)
    assert best_step(out) == 2
    assert sorted(step for step, _ in checkpoints(out)) == [2, 5]
    assert events[-1]["best_step"] == 2
    assert events[-1]["best_loss"] == 1.5
    assert main(["eval", f"{out}/best", "--transport", "threads", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"].endswith("ckpt/step-000002")
    assert main(["eval", str(out), "--transport", "threads", "--json", "--mesh", "cp2 tp2"]) == 0
    assert json.loads(capsys.readouterr().out)["model"].endswith("ckpt/step-000005")


def test_training_stops_early_and_a_resume_stays_stopped(tmp_path):
    out = tmp_path / "run"
    words = "--steps 9 --save.best True --eval.patience 2"
    events = trained(out, words, [3.0, 2.0, 2.5, 2.5, 1.0])
    end = events[-1]
    assert end["status"] == "finished"
    assert end["reason"] == "early_stop"
    assert end["steps"] == 4
    assert end["text"] == (
        "stopped early after step 4: no lower loss in 2 evaluations; "
        "the lowest was 2.0000 after step 2"
    )
    again = trained(out, f"{words} --resume auto", [1.0])
    assert again[-1]["reason"] == "early_stop"
    total = sum(event["event"] == "step" for event in again)
    assert total == 4
    more = trained(out, "--steps 5 --save.best True --resume auto", [1.0])
    actual = [event["step"] for event in more if event["event"] == "step"]
    assert actual == [1, 2, 3, 4, 5]
    assert best_step(out) == 5


def test_a_resume_from_before_the_best_checkpoint_forgets_it(tmp_path):
    out = tmp_path / "run"
    words = "--save.every 1 --save.keep 2 --save.best True"
    trained(out, f"--steps 4 {words}", [3.0, 2.5, 2.0, 1.0])
    assert best_step(out) == 4
    back = f"{words} --resume {out}/ckpt/step-000003"
    again = trained(out, f"--steps 6 {back}", [9.0, 8.0, 7.0])
    assert best_step(out) == 3, "step 4 is another one now"
    assert again[-1]["best_step"] == 3
    assert json.loads((out / "best.json").read_text()) == {"step": 3, "loss": 2.0}
    assert sorted(step for step, _ in checkpoints(out)) == [3, 5, 6]
    trained(out, f"--steps 7 {words} --resume auto --eval.every 7", [1.5])
    assert best_step(out) == 7, "the loss of 1.0 is of steps that were left"


@pytest.mark.parametrize("words", ["--mesh dp2", "--mesh pp2"])
def test_eval_finds_the_loss_of_the_run_on_any_layout(tmp_path, capsys, words):
    (tmp_path / "t.txt").write_text(TEXT)
    (tmp_path / "v.txt").write_text("a cat and a dog é\n" * 9)
    source = ["--data.source", str(tmp_path / "t.txt"), "--eval.source", str(tmp_path / "v.txt")]
    out = str(tmp_path / "run")
    steps = ["--steps", "2", "--eval.every", "2", "--out", out]
    actual = main(["train", *TINY, *source, *steps, *words.split()])
    assert actual == 0
    (trained_loss,) = [
        e for e in read_run_events(tmp_path / "run" / EVENTS) if e["event"] == "eval"
    ]
    capsys.readouterr()
    assert main(["eval", out, "--json", "--transport", "threads"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(trained_loss["loss"], rel=1e-6)
    assert found["targets"] == found["bytes"] == trained_loss["tokens"]
    bits = found["loss"] / 0.6931471805599453
    assert found["bits_per_byte"] == pytest.approx(bits)
