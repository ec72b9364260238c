"""Resuming a run: bit for bit on the same layout, within rounding on another one; incompatible changes are rejected."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tests.checkpoint.saving import run_facts, save
from tests.checkpoint.test_layouts import Entries, assemble, moments, parameters
from tests.matrix.layouts import LR, Case, batches
from tests.one_device import micro_batches
from tests.tiny_run import TINY
from weft.checkpoint import write as save_write
from weft.checkpoint.folder import checkpoints, set_aside
from weft.checkpoint.format import FORMAT
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.resume import data_changes
from weft.checkpoint.saver import Saver, StatusFlag
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.config.schema import DataConfig, OptimConfig, PrecisionConfig
from weft.core.axes import Box
from weft.data.dataset import open_data
from weft.errors import EXIT_OK, EXIT_USER
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.event_lines import read_events, step_history
from weft.train.event_log import EVENTS, EventLog
from weft.train.step import TrainStep
from weft.view.progress import Progress, event_text

FLOAT32 = PrecisionConfig()


@dataclass(frozen=True)
class Stretch:
    """Some steps on one layout, with a checkpoint before or behind them."""

    case: Case
    run: Run
    first: int
    last: int
    load: Path | None = None
    save: Path | None = None

    def __call__(self, comm: Comm) -> tuple[list[tuple[float, float]], list[Entries], object]:
        step = build_step(self.run, comm)
        if self.load:
            checkpoint = open_checkpoint(self.load)
            step.restore(checkpoint)
        told = []
        for index in range(self.first, self.last):
            told.append(train(step, self.case, index))
        if self.save:
            save(step, self.save, self.run, done=self.last)
        held = parameters(step) + moments(step)
        return told, held, step.loss_scale


def train(step: TrainStep, case: Case, index: int) -> tuple[float, float]:
    every = batches(case)
    batch = every[index % len(every)]
    report = step(micro_batches(batch, step.model.plan, step.model.comm.rank), lr=LR / (1 + index))
    return report.loss, report.grad_norm


def run_of(case: Case, **updates: object) -> Run:
    return case.run.model_copy(update={"precision": FLOAT32, **updates})


HALF = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
SCALED = PrecisionConfig(params="float32", compute="float16", reduce="float32")


@dataclass(frozen=True)
class Resumed:
    """A layout, and what differs from the usual run."""

    case: Case
    updates: dict[str, object] = field(default_factory=dict)


BATCH_OF_2 = {"layers": 2, "microbatches": 2}
BATCH_OF_1 = {"layers": 2, "microbatches": 1}
SAME = {
    "dp3": Resumed(Case("dp3", family="gpt2", **BATCH_OF_2)),
    "pp2 tp2": Resumed(Case("pp2 tp2", grouped=True, sequence=True, **BATCH_OF_2)),
    "dp4 zero 3": Resumed(Case("dp4", zero=3, **BATCH_OF_1)),
    "bfloat16": Resumed(Case("dp3", zero=1, **BATCH_OF_1), {"precision": HALF}),
    "float16": Resumed(Case("dp2", family="gpt2", **BATCH_OF_1), {"precision": SCALED}),
    "sgd": Resumed(Case("dp3", **BATCH_OF_1), {"optim": OptimConfig(name="sgd")}),
}


@pytest.mark.parametrize("name", SAME)
def test_ten_steps_are_five_and_five_to_the_last_bit(name, tmp_path):
    case = SAME[name].case
    run = run_of(case, **SAME[name].updates)
    path = tmp_path / "step-000005"
    all_ten = Stretch(case, run, 0, 10)
    straight = run_ranks(case.mesh, all_ten)
    first_five = Stretch(case, run, 0, 5, save=path)
    before = run_ranks(case.mesh, first_five)
    other_seed = run.model_copy(update={"seed": 12345})  # nothing may come from starting values
    last_five = Stretch(case, other_seed, 5, 10, load=path)
    after = run_ranks(case.mesh, last_five)
    for whole, one, two in zip(straight, before, after, strict=True):
        assert whole[0] == one[0] + two[0]
        assert whole[2] == two[2], "the loss scale"
        for right, found in zip(whole[1], two[1], strict=True):
            assert right.name == found.name
            assert right.box == found.box
            assert torch.equal(right.values, found.values), right.name


def test_another_layout_continues_within_rounding(tmp_path):
    legs = (
        Case("dp4", grouped=True, layers=2, microbatches=1, micro_size=2),
        Case("pp2 tp2", grouped=True, layers=2, microbatches=4, micro_size=2),
        Case("dp2", grouped=True, layers=2, microbatches=2, micro_size=2, zero=3),
    )
    told: list[tuple[float, float]] = []
    for number, case in enumerate(legs):
        if number:
            load = tmp_path / f"step-{3 * number:06d}"
        else:
            load = None
        stretch = Stretch(
            case,
            case.run,
            3 * number,
            3 * number + 3,
            load,
            tmp_path / f"step-{3 * number + 3:06d}",
        )
        ranks = run_ranks(case.mesh, stretch)
        told += ranks[0][0]
        last = assemble([rank[1] for rank in ranks])
    ranks = run_ranks("dp4", Stretch(legs[0], legs[0].run, 0, 9))
    right = assemble([rank[1] for rank in ranks])
    for (loss, norm), (right_loss, right_norm) in zip(told, ranks[0][0], strict=True):
        assert abs(loss - right_loss) <= 1e-9 * right_loss
        assert abs(norm - right_norm) <= 1e-9 * right_norm
    for name, values in right.items():
        smallest_scale = 1e-6 if name.startswith("optim/") else LR
        scale = max(values.abs().max().item(), smallest_scale)
        value = (last[name] - values).abs().max().item()
        assert value <= 1e-9 * scale, name


# saving while training goes on


@dataclass
class Asked:
    """Whether a rank was asked to stop."""

    requested: bool = False

    def __call__(self) -> bool:
        return self.requested


def saver_of(
    step: TrainStep,
    folder: Path,
    run: Run,
    *,
    every: int = 2,
    keep: int = 2,
    stop: Asked | None = None,
) -> Saver:
    return Saver(
        step.model.comm,
        folder,
        state=step.state,
        facts=run_facts(run, step),
        every=every,
        keep=keep,
        stop_requested=stop or Asked(),
    )


def play(step: TrainStep, case: Case, saver: Saver, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Steps as the loop plays them."""
    events = []
    every = batches(case)
    for index in steps:
        batch_of_all = every[index % len(every)]
        batch = micro_batches(batch_of_all, step.model.plan, step.model.comm.rank)
        report = step(batch, lr=LR, status=saver.status)
        events += list(saver.after_step(index + 1, report.status))
        if report.status & StatusFlag.STOP_REQUESTED:
            break
    return events


def test_checkpoints_come_during_training_and_the_oldest_are_removed(tmp_path):
    case = Case("pp2 dp2", family="gpt2")

    def rank(comm: Comm) -> list[dict[str, Any]]:
        step = build_step(case.run, comm)
        saver = saver_of(step, tmp_path, case.run)
        events = play(step, case, saver, range(9))
        return events + list(saver.finish(9, save=True))

    first, *others = run_ranks(case.mesh, rank)
    expected = [("save", step) for step in (2, 4, 6, 8, 9)]
    assert [(event["event"], event["step"]) for event in first] == expected
    assert others == [[]] * 3, "one rank tells"
    assert [step for step, _ in checkpoints(tmp_path)] == [9, 8]
    for _, path in checkpoints(tmp_path):
        open_checkpoint(path).verify()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [
        "step-000008",
        "step-000009",
    ]
    assert all(
        event["stall_s"] > 0 and event["write_s"] > 0 and event["bytes"] > 10_000 for event in first
    )


def test_what_is_saved_is_the_end_of_the_step_whatever_training_does_meanwhile(
    tmp_path, monkeypatch
):
    case = Case("dp2", zero=1)
    may_write = Event()
    right = save_write._write_rank

    def later(*args: Any, **options: Any) -> None:
        assert may_write.wait(30)
        right(*args, **options)

    monkeypatch.setattr(save_write, "_write_rank", later)

    def rank(comm: Comm) -> list[Entries]:
        step = build_step(case.run, comm)
        saver = saver_of(step, tmp_path, case.run, every=3)
        play(step, case, saver, range(3))
        then = parameters(step) + moments(step)
        assert play(step, case, saver, (3, 4)) == []
        may_write.set()
        list(saver.finish(5, save=False))
        return then

    then = assemble(run_ranks(case.mesh, rank))
    stored = open_checkpoint(tmp_path / "ckpt" / "step-000003")
    for name, values in then.items():
        section, _, owner = name.rpartition("/")
        source = stored.section(section)
        shape = source.shapes[owner]
        assert torch.equal(source.read(owner, Box.whole(shape)), values), name


def test_nothing_is_committed_before_all_ranks_have_written(tmp_path, monkeypatch):
    case = Case("dp2", family="gpt2", layers=2)
    may_write = Event()
    right = save_write._write_rank

    def later(tmp: Path, rank: int, held: Any, **options: Any) -> None:
        assert rank == 0 or may_write.wait(30)
        right(tmp, rank, held, **options)

    monkeypatch.setattr(save_write, "_write_rank", later)

    def rank(comm: Comm) -> tuple[list[Path], list[tuple[str, int]]]:
        step = build_step(case.run, comm)
        saver = saver_of(step, tmp_path, case.run, every=5)
        assert play(step, case, saver, range(9)) == []
        before = [path for _, path in checkpoints(tmp_path)]
        may_write.set()
        events = saver.finish(9, save=False)
        return before, [(event["event"], event["step"]) for event in events]

    first, second = run_ranks(case.mesh, rank)
    assert first == ([], [("save", 5)])
    assert second == ([], [])


def test_a_disk_error_of_one_rank_fails_the_save_and_nothing_else(tmp_path, monkeypatch):
    case = Case("dp3", family="gpt2", microbatches=2)
    right = save_write._write_piece

    def full(file: Any, piece: Any) -> Any:
        if "rank-00001" in file.name and "step-000004" in file.name:
            raise OSError(28, "No space left on device")
        return right(file, piece)

    monkeypatch.setattr(save_write, "_write_piece", full)

    def rank(comm: Comm) -> tuple[list[dict[str, Any]], str]:
        step = build_step(case.run, comm)
        saver = saver_of(step, tmp_path, case.run)
        events = play(step, case, saver, range(4))
        between = list(saver.finish(4, save=False))
        return events + between, saver.error

    ranks = run_ranks(case.mesh, rank)
    events = ranks[0][0]
    assert [(event["event"], event["step"]) for event in events] == [
        ("save", 2),
        ("save_failed", 4),
    ]
    assert events[1]["need_bytes"] > 10_000
    assert events[1]["free_bytes"] > 0
    assert events[1]["newest"].endswith("step-000002")
    assert "rank 1 (dp1): " in events[1]["why"]
    assert "the disk is full" in events[1]["why"]
    for _, trouble in ranks:
        assert "the disk is full" in trouble, "every rank knows"
    names = [path.name for path in (tmp_path / "ckpt").iterdir()]
    assert names == ["step-000002"]


def test_all_ranks_leave_after_the_step_in_which_one_was_asked_to(tmp_path):
    case = Case("dp3", family="gpt2", microbatches=2)

    def rank(comm: Comm) -> list[tuple[str, int]]:
        is_asked = comm.rank == 2
        step = build_step(case.run, comm)
        stop = Asked()
        saver = saver_of(step, tmp_path, case.run, every=0, stop=stop)
        play(step, case, saver, range(2))
        stop.requested = is_asked
        has_flag = bool(saver.status() & StatusFlag.STOP_REQUESTED)
        assert has_flag == is_asked
        events = play(step, case, saver, range(2, 1000))
        events += saver.finish(3, save=True)
        return [(event["event"], event["step"]) for event in events]

    assert run_ranks(case.mesh, rank) == [[("save", 3)], [], []]


def test_checkpoints_of_a_way_not_taken_are_set_aside(tmp_path):
    for step in (5, 10, 15):
        (tmp_path / "ckpt" / f"step-{step:06d}").mkdir(parents=True)
    set_aside(tmp_path, above=5)
    assert [step for step, _ in checkpoints(tmp_path)] == [5]
    (tmp_path / "ckpt" / "step-000010").mkdir()
    (moved,) = set_aside(tmp_path, above=5)
    assert moved.name == "aside-step-000010-2"


def test_steps_that_a_resume_went_back_behind_are_left_out():
    steps = [
        {"event": "step", "step": step, "loss": loss} for loss, step in enumerate((1, 2, 3, 4))
    ]
    events = [*steps, {"event": "resume", "step": 2}, {"event": "step", "step": 3, "loss": 9}]
    assert [(event["step"], event["loss"]) for event in step_history(events)] == [
        (1, 0),
        (2, 1),
        (3, 9),
    ]
    assert step_history([*events, {"event": "resume", "step": 0}]) == []


def test_views_count_on_from_the_checkpoint():
    progress = Progress()
    progress.update({"event": "run", "steps": 100, "start_step": 50})
    assert progress.num_done == 50
    progress.update({"event": "step", "step": 51, "loss": 1.0, "step_s": 2.0})
    assert progress.num_done == 51
    assert progress.left_s == 98.0


def test_what_happens_to_checkpoints_is_one_line_each():
    done = {
        "event": "save",
        "step": 8,
        "path": "x/ckpt/step-000008",
        "bytes": 2**21,
        "stall_s": 0.004,
        "write_s": 1.5,
    }
    assert event_text(done) == (
        "saved step 8: x/ckpt/step-000008, 2 MiB, training stalled 4 ms, written in 1.5 s"
    )
    failed = {
        "event": "save_failed",
        "step": 9,
        "why": "full",
        "need_bytes": 2**21,
        "free_bytes": 2**20,
        "newest": None,
    }
    assert event_text(failed) == (
        "warning: step 9 is not saved (2 MiB needed, 1 MiB free; full). Training continues; there is no checkpoint"
    )


# the command, in this process


def weft(*words: str) -> int:
    return main(["train", *TINY, *words])


def prove(*words: str | Path) -> int:
    try:
        return main(["prove", *map(str, words)])
    finally:
        torch.set_flush_denormal(
            False
        )  # a process of its own keeps it; what comes next in this one wants denormals


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A text to read, and a run that has saved steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    source = ("--data.source", str(folder / "text.txt"))
    words = ("--out", str(folder / "run"), "--steps", "5", "--save.every", "2", "--save.keep", "9")
    assert weft(*source, *words) == EXIT_OK
    return folder, source


def copy_of(place, name: str) -> Path:
    folder = place[0] / name
    shutil.copytree(place[0] / "run", folder)
    return folder


def events_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_events(folder / EVENTS))


def test_a_run_that_is_done_has_nothing_to_do_and_more_steps_go_on(place, capsys):
    run = copy_of(place, "more")
    assert weft(*place[1], "--out", str(run), "--steps", "5", "--resume", "auto") == EXIT_OK
    assert "all 5 steps are done: to train more, raise --steps" in capsys.readouterr().out
    assert (
        weft(*place[1], "--out", str(run), "--steps", "7", "--resume", "auto", "--mesh", "dp2")
        == EXIT_OK
    )
    shown = capsys.readouterr().out
    assert f"resumed after step 5: {run}/ckpt/step-000005, written by one rank" in shown
    actual = [event["step"] for event in step_history(events_of(run))]
    assert actual == [1, 2, 3, 4, 5, 6, 7]
    assert (run / "run-1.toml").read_text() == (place[0] / "run" / "run.toml").read_text()
    assert json.loads((run / "plan.json").read_text())["mesh"] == "dp2"


def test_the_same_command_can_be_started_for_ever(place, capsys):
    words = (
        *place[1],
        "--out",
        str(place[0] / "ever"),
        "--steps",
        "3",
        "--save.every",
        "1",
        "--resume",
        "auto",
    )
    assert weft(*words) == EXIT_OK
    assert (
        "no checkpoint in the run folder yet: training starts at step 1" in capsys.readouterr().out
    )
    assert weft(*words) == EXIT_OK
    events = events_of(place[0] / "ever")
    actual = [event["step"] for event in events if event["event"] == "step"]
    assert actual == [1, 2, 3]
    actual = [event["step"] for event in events if event["event"] == "resume"]
    assert actual == [0, 3]
    actual = [event["step"] for event in events if event["event"].startswith("save")]
    assert actual == [1, 2, 3]


def test_auto_falls_back_past_broken_checkpoints_and_says_so(place, capsys):
    run = copy_of(place, "broken")
    (run / "ckpt" / "step-000005" / "manifest.json").write_text("{")
    data = run / "ckpt" / "step-000004" / "rank-00000.safetensors"
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 4
    data.write_bytes(flipped)
    assert weft(*place[1], "--out", str(run), "--steps", "5", "--resume", "auto") == EXIT_OK
    shown = capsys.readouterr().out
    assert f"skipped: {run}/ckpt/step-000005/manifest.json" in shown
    assert f"skipped: {run}/ckpt/step-000004/rank-00000.safetensors" in shown
    assert f"resumed after step 2: {run}/ckpt/step-000002" in shown
    right = [event["loss"] for event in step_history(events_of(place[0] / "run"))]
    assert [event["loss"] for event in step_history(events_of(run))] == right
    assert {path.name for path in (run / "ckpt").iterdir()} >= {
        "aside-step-000005",
        "aside-step-000004",
    }


def test_another_run_folder_begins_with_the_checkpoints_of_one(place, capsys):
    out = place[0] / "branch"
    words = ("--resume", str(place[0] / "run" / "ckpt" / "step-000004"), "--steps", "5")
    assert weft(*place[1], "--out", str(out), *words) == EXIT_OK
    (step,) = step_history(events_of(out))
    assert step["step"] == 5
    events = events_of(place[0] / "run")
    expected = step_history(events)[-1]["loss"]
    assert step["loss"] == expected
    capsys.readouterr()
    assert prove(out) != EXIT_OK
    assert "starts after step 4" in capsys.readouterr().err


def test_a_resumed_run_can_be_proved(place, capsys):
    run = copy_of(place, "proved")
    assert (
        weft(*place[1], "--out", str(run), "--steps", "6", "--resume", "auto", "--optim.lr", "1")
        == EXIT_OK
    )
    assert prove(run, "--first", "20") == EXIT_OK
    assert ", 5 steps, compared" in capsys.readouterr().out.replace("\n", " "), (
        "those behind the resume have another learning rate"
    )


REFUSED = {
    "not a checkpoint": (
        ("--resume", "{tmp}/text.txt"),
        "error: resume: {tmp}/text.txt: not a checkpoint",
    ),
    "no such path": (
        ("--resume", "{tmp}/nowhere"),
        "error: resume: {tmp}/nowhere: no such checkpoint",
    ),
    "a folder of other things": (("--resume", "{tmp}"), "error: resume: {tmp}: not a checkpoint"),
    "a run without checkpoints": (
        ("--resume", "{tmp}/bare"),
        "error: resume: there is no checkpoint in this run folder",
    ),
    "auto without a folder": (
        ("--resume", "auto"),
        "error: resume: auto searches the run folder, and out is not set",
    ),
    "newer format": (("--resume", "{tmp}/newer/ckpt/step-000005"), "a newer format (got format 99"),
    "missing shard": (
        ("--resume", "{tmp}/short/ckpt/step-000005"),
        "rank-00000.safetensors: missing",
    ),
    "broken manifest": (
        ("--resume", "{tmp}/torn/ckpt/step-000005"),
        "error: resume: {tmp}/torn/ckpt/step-000005/manifest.json",
    ),
    "all are broken": (
        ("--resume", "{tmp}/allbroken"),
        "error: resume: no checkpoint of {tmp}/allbroken is valid",
    ),
    "another model": (
        ("--resume", "{tmp}/run", "--model.ffn", "48"),
        "a checkpoint of another model: ffn differs",
    ),
    "another family": (
        ("--resume", "{tmp}/run", "--model.name", "gpt2"),
        "a checkpoint of another model",
    ),
    "another seed": (
        ("--resume", "{tmp}/run", "--seed", "2"),
        "error: seed: differs from the checkpoint",
    ),
    "another batch": (
        ("--resume", "{tmp}/run", "--batch.global_size", "8"),
        "error: batch.global_size: differs from the checkpoint {tmp}/run/ckpt/step-000005 (got 8; need 4). Fix: --batch.",
    ),
    "another length": (
        ("--resume", "{tmp}/run", "--data.seq_len", "4"),
        "error: data.seq_len: differs from the",
    ),
    "another optimizer": (
        ("--resume", "{tmp}/run", "--optim.name", "sgd"),
        "error: optim.name: differs from the",
    ),
    "adapters on a whole model": (
        ("--resume", "{tmp}/run", "--lora.rank", "2"),
        "error: lora.rank: the checkpoint {tmp}/run/ckpt/step-000005 has no adapters (got 2; need 0). Fix: --lora.base",
    ),
    "another type": (
        ("--resume", "{tmp}/run", "--precision.params", "float64", "--precision.reduce", "float64"),
        "error: precision.params: differs from the checkpoint",
    ),
    "another run's folder": (
        ("--resume", "{tmp}/run", "--out", "{tmp}/bare"),
        "error: out: holds a run already",
    ),
    "a run is there": (("--out", "{tmp}/run"), "error: out: holds a run already"),
}


@pytest.fixture(scope="module")
def spoilt(place):
    """Checkpoints with something wrong, beside the one that is right."""

    def manifest(name: str) -> Path:
        return copy_of(place, name) / "ckpt" / "step-000005" / "manifest.json"

    newer = manifest("newer")
    text = newer.read_text().replace(f'"format":{FORMAT}', '"format":99').encode()
    newer.write_bytes(text)
    newer.with_name("manifest.json.sha256").write_text(
        f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"
    )
    manifest("short").with_name("rank-00000.safetensors").unlink()
    manifest("torn").write_text("{")
    for path in (copy_of(place, "allbroken") / "ckpt").iterdir():
        (path / "manifest.json").write_text("{")
    (place[0] / "bare" / "ckpt").mkdir(parents=True)
    return place


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_resumed_is_one_line_before_the_start(case, spoilt, capsys, monkeypatch):
    def nothing_starts(*args: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("weft.start.train_run.train", nothing_starts)
    words, line = REFUSED[case]
    told_words = [word.format(tmp=spoilt[0]) for word in words]
    tiny = [
        word for word in TINY if "gpt2" not in told_words or not word.startswith("--model.kv_heads")
    ]
    if "gpt2" in told_words:
        tiny = list(TINY[TINY.index("--data.seq_len") :])
    actual = main(["train", *tiny, *spoilt[1], *told_words])
    assert actual == EXIT_USER
    told = capsys.readouterr().err.splitlines()
    message = line.format(tmp=spoilt[0])
    assert any(message in each for each in told), told
    assert len(told) == 1 or case == "another family"
    assert all(each.count("Fix: ") <= 1 for each in told), "one fix a line"


def test_it_is_reported_before_torch_is_imported(spoilt):
    words = ["train", *TINY, *spoilt[1], "--resume", f"{spoilt[0]}/short/ckpt/step-000005"]
    program = f"import sys; from weft.cli import main; code = main({words}); sys.exit(99 if 'torch' in sys.modules else code)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    actual = (ran.returncode, len(ran.stderr.splitlines()))
    assert actual == (EXIT_USER, 1), ran.stderr


def test_other_data_is_rejected(place, capsys):
    other = place[0] / "other.txt"
    other.write_text("another text altogether, and of another length. " * 40)
    words = (
        "--data.source",
        str(other),
        "--resume",
        str(place[0] / "run"),
        "--out",
        str(place[0] / "never"),
    )
    assert weft(*words, "--steps", "6") == EXIT_USER
    assert (
        "data.source: other data than the checkpoint was trained on: sha256 differs"
        in capsys.readouterr().err
    )


def test_another_packing_of_the_same_tokens_is_other_data(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text of a document. " * 8)
    facts = {}
    model = FAMILIES["llama3"].Config()
    for packing in ("stream", "documents"):
        data = DataConfig(source=str(tmp_path), seq_len=8, packing=packing)
        facts[packing] = open_data(data, model).facts()
    first, second = facts.values()
    assert first["sha256"] == second["sha256"]
    assert first["samples"] == second["samples"]
    (fault,) = data_changes(first, second)
    assert str(fault) == (
        "data.packing: differs from that of the checkpoint (got documents; need stream). "
        "Fix: --data.packing stream"
    )
    without_packing = {name: value for name, value in first.items() if name != "packing"}
    assert not list(data_changes(without_packing, second)), "a checkpoint of an older weft"


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_the_same_tokens_in_other_documents_are_other_data_where_documents_are_packed(
    tmp_path, packing
):
    text = "some text of a document. " * 8
    found = {}
    for cut in (40, 60):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "a.txt").write_text(text[:cut])
        (folder / "b.txt").write_text(text[cut:])
        data = DataConfig(source=str(folder), seq_len=8, packing=packing)
        found[cut] = open_data(data, FAMILIES["llama3"].Config()).facts()
    changes = [change.what for change in data_changes(found[40], found[60])]
    what = "other data than the checkpoint was trained on: documents_sha256 differs"
    assert changes == ([what] if packing == "documents" else [])
    found[40].pop("documents_sha256", None)
    assert not list(data_changes(found[40], found[60])), "a checkpoint of an earlier version"


def test_a_full_disk_delays_the_lines_of_events_and_loses_none(tmp_path, monkeypatch):
    right = os.write
    room = [10_000]

    def write(file: int, data: bytes) -> int:
        taken = min(len(data), room[0])
        if not taken:
            raise OSError(28, "No space left on device")
        room[0] -= taken
        return right(file, data[:taken])

    monkeypatch.setattr(os, "write", write)
    with EventLog(tmp_path) as journal:
        for number in range(5):
            room[0] = {1: 7, 2: 0}.get(number, 10_000)
            journal.emit({"event": "step", "step": number})
    assert [event["step"] for event in events_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_lost_lines_are_reported(tmp_path, monkeypatch):
    class Seen:
        def __init__(self) -> None:
            self.told: list[Any] = []

        def handle(self, event: Any) -> None:
            self.told.append(event)

        def close(self) -> None: ...

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    seen = Seen()
    with EventLog(tmp_path, [seen]) as journal:
        journal.emit({"event": "end"})
    assert (
        seen.told[-1]["text"]
        == "warning: the disk is full, and the last 16 bytes of events.jsonl are lost"
    )
