"""The status board: phases, blocks and waits that ranks write and their launcher reads; training reports all of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import TINY
from weft.comm.comm import Comm
from weft.comm.transport import Call
from weft.config.run import Run
from weft.run.rank_status import NUM_DURATIONS, NUM_GROUPS, Phase, StatusBoard
from weft.run.world import Attempt
from weft.start.checked_run import load_checked_run
from weft.testing import run_ranks
from weft.train.build_training import build_training
from weft.train.loop import step_events

ALL_REDUCE = Call("all_reduce", "dp", (0, 1, 2), 1, "all_reduce(sum) float32[4]")
SEND = Call("send", "pp", (1, 2), 0, "send float32[8]")


@pytest.fixture
def board(tmp_path):
    return StatusBoard.create(tmp_path / "board", 3)


def test_a_new_slot_shows_a_rank_that_starts(board):
    snapshot = board.read(2)
    assert snapshot.rank == 2
    assert snapshot.step == 0
    assert snapshot.phase == "start"
    assert snapshot.waiting is None
    assert snapshot.place == "start"


def test_another_mapping_of_the_file_reads_what_a_rank_writes(board, tmp_path):
    status = board.rank(1)
    status.begin(attempt=2)
    status.on_phase(7, "backward")
    status.on_block("layer5")
    status.started(ALL_REDUCE)
    status.waiting(ALL_REDUCE, status.started(ALL_REDUCE))
    before = time.monotonic_ns()
    snapshot = StatusBoard.open(tmp_path / "board").read(1)
    assert snapshot.pid == os.getpid()
    assert snapshot.attempt == 2
    assert snapshot.place == "step 7, backward of layer5"
    assert snapshot.waiting is not None
    assert snapshot.waiting.text == "all_reduce(sum) float32[4] over dp"
    assert snapshot.waiting.members == (0, 1, 2)
    assert snapshot.waiting.position == 1, "the second call of this group"
    assert snapshot.num_started == {snapshot.waiting.group: 2}
    assert before - 10**9 < snapshot.changed_ns <= before
    assert board.read(0).progress == 0, "other slots are untouched"


def test_a_finished_call_is_no_longer_waited_for(board):
    status = board.rank(0)
    status.waiting(SEND, status.started(SEND))
    assert board.read(0).waiting.members == (1, 2)
    before = board.progress(0)
    status.finished()
    assert board.read(0).waiting is None
    assert board.progress(0) > before


def test_a_long_text_is_cut_and_the_next_short_one_is_whole(board):
    status = board.rank(0)
    long = Call("all_reduce", "dp", tuple(range(2000)), 0, "x" * 5000)
    status.waiting(long, status.started(long))
    assert board.read(0).waiting.members == (), "too many to show"
    assert set(board.read(0).waiting.text) == {"x"}
    status.waiting(SEND, status.started(SEND))
    assert board.read(0).waiting.text == "send float32[8] over pp"
    status.on_block("layer100")
    status.on_block("head")
    status.on_phase(1, "forward")
    assert board.read(0).place == "step 1, forward of head"
    assert board.read(1).progress == 0


def test_groups_beyond_the_table_are_not_counted(board):
    status = board.rank(0)
    for last in range(1, NUM_GROUPS + 10):
        status.started(Call("barrier", "dp", (0, last), 0, "barrier"))
    assert len(board.read(0).num_started) == NUM_GROUPS
    assert board.read(1).num_started == {}


def test_step_times_exclude_evaluation_and_saves(board, monkeypatch):
    now_ns = 0
    monkeypatch.setattr("weft.run.rank_status.time.monotonic_ns", lambda: now_ns)
    status = board.rank(0)
    phases: tuple[Phase, ...] = ("data", "forward", "backward", "reduce", "update", "end", "save")
    for step in range(1, NUM_DURATIONS + 11):
        for phase in phases:
            now_ns += 10**9
            status.on_phase(step, phase)
    times = board.read(0).step_times_s
    assert len(times) == NUM_DURATIONS
    assert set(times) == {5.0}, "from data to the end of update"


def test_a_file_of_another_size_is_no_board(tmp_path):
    path = tmp_path / "board"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="no status board"):
        StatusBoard.open(path)


def train(comm: Comm, run: Run, board: StatusBoard | None) -> tuple[Any, ...]:
    """Losses and parameters of three steps, and the places that the rank reported."""
    places: list[str] = []
    status = None
    if board is not None:
        status = board.rank(comm.rank)
        comm.monitor = status
        written = status._changed

        def changed(now_ns: int) -> None:
            written(now_ns)
            snapshot = board.read(comm.rank)
            waiting = f", in {snapshot.waiting.text}" if snapshot.waiting else ""
            places.append(snapshot.place + waiting)

        status._changed = changed  # type: ignore[method-assign]
    attempt = None if status is None else Attempt(status)
    training = build_training(run, comm, stop_requested=lambda: False, attempt=attempt)
    events = step_events(
        training.step, training.loader, training.step_range, on_phase=training.on_phase
    )
    numbers = [(event["loss"], event["grad_norm"]) for event in events]
    shards = training.step.grads.sharded_params
    params = {name: shard.detach().clone() for name, shard in shards.items()}
    return numbers, params, places


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "dp3", "--batch.global_size", "6", "--parallel.zero", "3"),
        ("--mesh", "pp2 tp2", "--pipeline.schedule", "zero_bubble"),
    ],
    ids=lambda words: words[1],
)
def test_a_reported_run_computes_the_same_bits_and_reports_where_it_is(words, tmp_path: Path):
    mesh = words[1]
    out = ("--out", str(tmp_path / "run"))
    run = load_checked_run([*TINY, *words, "--steps", "3", *out])
    silent = run_ranks(mesh, lambda comm: train(comm, run, None))
    board = StatusBoard.create(tmp_path / "board", len(silent))
    reported = run_ranks(mesh, lambda comm: train(comm, run, board))
    for (numbers, params, none), (same_numbers, same_params, places) in zip(
        silent, reported, strict=True
    ):
        assert none == []
        assert numbers == same_numbers
        for name in params:
            assert torch.equal(params[name], same_params[name])
        for step in (1, 2, 3):
            for phase in ("data", "forward of layer", "backward of layer", "reduce", "update"):
                assert any(place.startswith(f"step {step}, {phase}") for place in places), phase
        assert any(", in all_" in place for place in places), "waits are reported"
