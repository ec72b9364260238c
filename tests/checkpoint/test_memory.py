"""Snapshots in memory: when they are taken, what they cost, and that restarted ranks continue bit for bit."""

from __future__ import annotations

import itertools
import shutil
from collections import namedtuple
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TINY
from weft.checkpoint import memory
from weft.checkpoint.folder import checkpoints
from weft.checkpoint.memory import DUE, FLAG_SHIFT, MAX_COST, MIN_INTERVAL_S, snapshots_in_folder
from weft.checkpoint.saver import StatusFlag
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.run.rank_status import StatusBoard
from weft.run.world import Attempt, Restart
from weft.start.checked_run import load_checked_run
from weft.testing import run_ranks
from weft.train.build_training import build_training
from weft.train.loop import step_events

NUM_STEPS = 9


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    source = ("--data.source", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"))
    words = ("--mesh", "dp3", "--batch.global_size", "6", "--parallel.zero", "2")
    return load_checked_run([*TINY, *source, *words, "--steps", str(NUM_STEPS)])


def attempt_of(folder: Path, rank: int, restart: Restart | None = None) -> Attempt:
    path = folder / f"board-{rank}-{restart is not None}"
    status = StatusBoard.create(path, 1).rank(0)
    (folder / "memory").mkdir(exist_ok=True)
    return Attempt(status=status, memory_folder=folder / "memory", restart=restart)


def train(comm: Comm, run: Run, attempt: Attempt | None, *, until: int = NUM_STEPS) -> Any:
    """Events before the first step and of all steps; stops dead after step `until`. No
    snapshot is under way when the next one is due, or it would be left out on busy cores.
    """
    training = build_training(run, comm, stop_requested=lambda: False, attempt=attempt)
    events = list(training.opening_events)
    for event in step_events(
        training.step,
        training.loader,
        training.step_range,
        saver=training.saver,
        snapshots=training.snapshots,
    ):
        events.append(event)
        if event["event"] == "step" and training.snapshots is not None:
            events += training.snapshots.wait()  # for the one after the step before
        if event["event"] == "step" and event["step"] == until:
            break
    return events


def with_snapshots(run: Run, every: int | None) -> Run:
    return run.with_values({"save": run.save.model_copy(update={"memory_every": every})})


def steps_of(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    steps = [event for event in events if event["event"] == "step"]
    return [(event["step"], event["loss"], event["grad_norm"]) for event in steps]


def test_ranks_that_are_started_again_go_on_from_the_newest_snapshot_bit_for_bit(run, tmp_path):
    whole = run_ranks("dp3", lambda comm: train(comm, run, None))[0]
    run = with_snapshots(run, 2)
    died = run_ranks(
        "dp3", lambda comm: train(comm, run, attempt_of(tmp_path, comm.rank), until=7)
    )[0]
    actual = [event["event"] for event in died]
    assert actual == ["run", *["step"] * 7], "snapshots are no events"
    ((step, _),) = checkpoints(tmp_path / "memory")
    assert step == 6, "the newest, and it alone"
    restart = Restart(
        number=1,
        most=3,
        rank=1,
        reason="rank 1 (dp1): killed",
        detected_s=0.0,
        at_s=0.0,
        had_started=True,
    )
    again = run_ranks(
        "dp3", lambda comm: train(comm, run, attempt_of(tmp_path, comm.rank, restart))
    )[0]
    first, *rest = again
    assert first["event"] == "restart"
    assert first["step"] == step
    assert first["source"] == "memory"
    assert first["attempt"] == 1
    assert first["of"] == 3
    assert first["rank"] == 1
    assert steps_of(died)[:step] + steps_of(rest) == steps_of(whole)


def test_a_run_that_goes_on_from_a_snapshot_of_its_last_step_still_saves_it(run, tmp_path):
    run_ranks(
        "dp3",
        lambda comm: train(comm, with_snapshots(run, 2), attempt_of(tmp_path, comm.rank), until=5),
    )
    ((last, _),) = checkpoints(tmp_path / "memory")
    run = with_snapshots(run, 2).with_values({"steps": last})
    restart = Restart(
        number=1,
        most=3,
        rank=1,
        reason="rank 1 (dp1): killed",
        detected_s=0.0,
        at_s=0.0,
        had_started=True,
    )

    def finish(comm: Comm) -> int:
        training = build_training(
            run,
            comm,
            stop_requested=lambda: False,
            attempt=attempt_of(tmp_path, comm.rank, restart),
        )
        list(training.saver.finish(last, save=True))
        return training.step_range.start

    assert run_ranks("dp3", finish) == [last] * 3
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [last]


def test_a_damaged_snapshot_is_passed_over_for_the_checkpoint_or_the_start(run, tmp_path):
    run = with_snapshots(run, 2)
    run_ranks("dp3", lambda comm: train(comm, run, attempt_of(tmp_path, comm.rank), until=7))
    ((_, path),) = checkpoints(tmp_path / "memory")
    data = next(path.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"\0")
    restart = Restart(
        number=1, most=3, rank=1, reason="", detected_s=0.0, at_s=0.0, had_started=True
    )
    first, *_ = run_ranks(
        "dp3", lambda comm: train(comm, run, attempt_of(tmp_path, comm.rank, restart), until=1)
    )[0]
    assert first["step"] == 0
    assert first["source"] == "start"
    assert list(checkpoints(tmp_path / "memory")) == [], "later snapshots are removed"


def test_no_snapshots_where_memory_is_short_and_a_warning_if_they_were_asked_for(
    run, tmp_path, monkeypatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage(100, 0, 100))
    for every, num_notes in ((2, 1), (None, 0)):
        asked = with_snapshots(run, every)
        folder = tmp_path / str(every)
        folder.mkdir()
        events = run_ranks(
            "dp3",
            lambda comm, asked=asked, folder=folder: train(
                comm, asked, attempt_of(folder, comm.rank), until=3
            ),
        )[0]
        notes = [event["text"] for event in events if event["event"] == "note"]
        assert len(notes) == num_notes
        for note in notes:
            assert "100 bytes of memory are available" in note
        assert list(checkpoints(folder / "memory")) == []


def test_automatic_snapshots_take_less_than_their_share_of_the_time(run, tmp_path):
    def asked_at(comm: Comm) -> list[float]:
        now_s = 0.0
        training = build_training(run, comm, stop_requested=lambda: False)
        snapshots = snapshots_in_folder(
            comm,
            tmp_path,
            state=training.step.state,
            facts=training.saver._facts,
            every=None,
            now_s=lambda: now_s,
        )
        times: list[float] = []
        for step in range(1, 4001):
            now_s = 0.1 * step
            status = snapshots.status()
            if status & DUE:
                times.append(now_s)
                list(snapshots.after_step(step, DUE))
                list(snapshots.wait())
                snapshots.cost_s = 0.5
            assert not status & StatusFlag.STOP_REQUESTED << FLAG_SHIFT
        snapshots.close()
        return times

    one_rank = run.with_values(
        {"mesh": "", "parallel": run.parallel.model_copy(update={"zero": 0})}
    )
    run = one_rank
    times = run_ranks("", asked_at)[0]
    assert times[0] == pytest.approx(MIN_INTERVAL_S, abs=0.2)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    for gap in gaps:
        assert 0.5 / gap <= MAX_COST + 1e-9
    assert len(times) > 10
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_a_run_takes_automatic_snapshots(run, tmp_path, monkeypatch):
    """What rank 0 asks for reaches all ranks with the numbers of a step."""
    monkeypatch.setattr(memory, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(memory, "MAX_COST", 1e9)
    run_ranks("dp3", lambda comm: train(comm, run, attempt_of(tmp_path, comm.rank), until=3))
    (newest, *_) = [step for step, _ in checkpoints(tmp_path / "memory")]
    assert newest >= 2


@pytest.mark.parametrize(("has_launcher", "separate"), [(True, ()), (False, (1,))])
def test_ranks_of_torchrun_with_a_status_are_asked_whether_they_share_the_run_folder(
    run, tmp_path, monkeypatch, has_launcher, separate
):
    """Ranks of one launcher are on one machine; others may have disks of their own."""
    module = import_module("weft.train.training_parts")
    monkeypatch.setattr(module, "ranks_without_folder", lambda comm, folder: (1,))

    def separate_ranks(comm: Comm) -> tuple[int, ...]:
        status = StatusBoard.create(tmp_path / f"board{comm.rank}", 1).rank(0)
        attempt = Attempt(status, has_launcher=has_launcher)
        training = build_training(run, comm, stop_requested=lambda: False, attempt=attempt)
        return tuple(training.saver.separate)

    assert run_ranks("dp3", separate_ranks) == [separate] * 3
