"""Stragglers: a rank that works longer than ranks with the same layers is reported once; unequal stages are not."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spoiled_runs import events_of, words_of, write_text
from weft.cli import main
from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.errors import EXIT_OK, EXIT_USER
from weft.testing import run_ranks
from weft.train import straggler
from weft.train.straggler import WINDOW, StragglerWatch, references

SLEEP_S = 0.01


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for each rank of these tests, whatever machine they run on."""
    monkeypatch.setattr(straggler, "num_cores", lambda: 8)


@pytest.mark.parametrize(
    ("mesh", "busy_s", "expected"),
    [
        ("dp4", [1, 1, 9, 1], {0: 1, 1: 1, 2: 1, 3: 1}),
        ("dp2", [1, 9], {0: 9, 1: 1}),
        ("dp3", [1, 2, 9], {0: 2, 1: 2, 2: 2}),
        ("pp2 dp2", [1, 1, 8, 9], {0: 1, 1: 1, 2: 9, 3: 8}),
        ("pp3", [1, 5, 9], {}),
    ],
)
def test_a_rank_is_compared_with_ranks_of_its_pipeline_stage(
    mesh: str, busy_s: list[float], expected: dict[int, float]
) -> None:
    found = references(busy_s, Mesh.parse(mesh))
    assert found == expected


def set_busy_times(monkeypatch: pytest.MonkeyPatch, busy_s: dict[int, list[float]]) -> None:
    """Let each rank measure these busy times, one window after the other; the last one stays."""

    def busy_since_last(watch: StragglerWatch) -> float:
        windows = busy_s[watch.comm.rank]
        return windows[min(watch._num_windows, len(windows) - 1)]

    monkeypatch.setattr(StragglerWatch, "_busy_since_last", busy_since_last)


def guards_of(out: Path) -> list[dict[str, Any]]:
    return [event for event in events_of(out) if event["event"] == "guard"]


def test_a_slow_rank_is_reported_once_with_its_place_host_and_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_busy_times(monkeypatch, {0: [0.02], 1: [0.02], 2: [0.1], 3: [0.02]})
    text = write_text(tmp_path)
    out = tmp_path / "run"
    keys = ("--mesh", "dp2 tp2", "--steps", str(5 * WINDOW), "--batch.global_size", "2")
    argv = ["train", *words_of(text, out, *keys)]
    assert main(argv) == EXIT_OK
    (guard,) = guards_of(out)
    assert guard["kind"] == "straggler"
    assert guard["rank"] == 2
    assert guard["step"] == 3 * WINDOW
    assert guard["coordinates"] == "dp1 tp0"
    assert guard["host"] == socket.gethostname()
    assert guard["ratio"] == pytest.approx(5)
    line = f"rank 2 (dp1 tp0) on {socket.gethostname()} is slow: it works 100 ms a step, 5.0 times"
    assert line in capsys.readouterr().out


def events_of_ranks(mesh: str, num_windows: int) -> list[list[dict[str, Any]]]:
    """The events of every rank after some windows."""

    def watch_steps(comm: Comm) -> list[dict[str, Any]]:
        watch = StragglerWatch(comm, factor=3.0)
        events: list[dict[str, Any]] = []
        for step in range(num_windows * WINDOW):
            events.extend(watch.after_step(step + 1))
        return events

    return run_ranks(mesh, watch_steps)


def test_one_slow_window_the_first_windows_and_short_steps_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy_s = {
        0: [0.02],
        1: [0.02],
        2: [0.2, 0.2, 0.02, 0.2, 0.02],  # warm-up, then single windows
        3: [0.02, 0.02, 0.05],  # 2.5 times as long
    }
    set_busy_times(monkeypatch, busy_s)
    assert events_of_ranks("dp4", 7) == [[], [], [], []]
    set_busy_times(monkeypatch, {0: [0.001], 1: [0.005]})
    assert events_of_ranks("dp2", 7) == [[], []]


def test_every_rank_reports_the_same_slow_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_busy_times(monkeypatch, {0: [0.02], 1: [0.02, 0.02, 0.02, 0.1], 2: [0.08], 3: [0.02]})
    results = events_of_ranks("dp4", 6)
    assert [(event["rank"], event["step"]) for event in results[0]] == [
        (2, 3 * WINDOW),
        (1, 5 * WINDOW),
    ]
    for result in results:
        assert result == results[0]


def test_no_rank_is_reported_on_a_host_with_more_ranks_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_busy_times(monkeypatch, {0: [0.02], 1: [0.02], 2: [0.1], 3: [0.02]})
    monkeypatch.setattr(straggler, "num_cores", lambda: 3)
    assert events_of_ranks("dp4", 6) == [[], [], [], []]
    monkeypatch.setattr(straggler, "num_cores", lambda: 4)
    assert [len(events) for events in events_of_ranks("dp4", 6)] == [1, 1, 1, 1]


def test_waits_for_other_ranks_are_not_busy_time() -> None:
    def waited(comm: Comm) -> tuple[float, float]:
        watch = StragglerWatch(comm, factor=3.0)
        busy_s = 0.0
        for _ in range(20):
            if comm.rank == 3:
                time.sleep(SLEEP_S)
            comm.all_reduce(torch.ones(4), "dp")
            busy_s += watch._busy_since_last()
        return watch.clock.waited_s, busy_s

    results = run_ranks("dp4", waited)
    slept_s = 20 * SLEEP_S
    assert results[3][1] >= slept_s
    for waited_s, _ in results[:3]:
        assert waited_s > 0.8 * slept_s


def test_stragglers_need_a_factor_above_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--guard.stragglers", "1"]) == EXIT_USER
    message = capsys.readouterr().err
    assert (
        "error: guard.stragglers: every rank would be a straggler (got 1; need above 1" in message
    )
