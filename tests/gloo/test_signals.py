"""Signals to the launcher at the start, in a step and in a save: how the run ends, and that nothing remains."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.programs import WEFT, programs
from tests.supervised import PATIENCE_S, training, wait_for_rank, words_of
from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_QUIT
from weft.run.folder_lock import find_lock
from weft.run.rank_status import RankSnapshot
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

DP2 = ("--mesh", "dp2", "--batch.global_size", "4")
MEMORY = Path("/dev/shm")
MOMENTS = {
    "start": lambda rank: rank.phase == "start",
    "step": lambda rank: rank.step >= 3 and rank.phase == "backward",
    "save": lambda rank: rank.step >= 3 and rank.phase == "save",
}
END_S = 30.0

pytestmark = pytest.mark.timeout(400)


def remains(pids: list[int], folders: list[Path]) -> list[object]:
    """Processes and folders that are there after END_S, sooner if none is."""
    deadline = time.monotonic() + END_S
    left: list[object] = [None]
    while left and time.monotonic() < deadline:
        left = [pid for pid in pids if is_running(pid)]
        left += [folder for folder in folders if folder.exists()]
        time.sleep(0.01)
    return left


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# The state in which each signal leaves a run: exit code, and status of its `end` event.
SIGNALS = {
    signal.SIGTERM: (EXIT_PREEMPTED, "stopped"),
    signal.SIGHUP: (EXIT_PREEMPTED, "stopped"),
    signal.SIGUSR1: (EXIT_PREEMPTED, "stopped"),
    signal.SIGINT: (EXIT_INTERRUPTED, "interrupted"),
    signal.SIGQUIT: (EXIT_QUIT, "interrupted"),
    signal.SIGKILL: (-signal.SIGKILL, None),
}
QUICK = [(signal.SIGHUP, "step"), (signal.SIGQUIT, "save"), (signal.SIGKILL, "step")]
ALL = [(number, moment) for number in SIGNALS for moment in MOMENTS]
CASES = [
    pytest.param(
        *case, marks=() if case in QUICK else pytest.mark.slow, id=f"{case[0].name}-{case[1]}"
    )
    for case in ALL
]


@pytest.mark.parametrize(("number", "moment"), CASES)
def test_a_signal_to_the_launcher_leaves_nothing_behind(tmp_path, number, moment):
    out = tmp_path / "run"
    words = words_of(DP2, steps=1_000_000, save__every=1, save__memory_every=1)
    with training(out, *words) as process:
        is_there = MOMENTS[moment]
        wait_for_rank(out, 1, is_there)
        folder = Path(find_lock(out).holder.status_board).parent
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(children) == 3, "two ranks and the cleaner"
        in_memory = MEMORY / folder.name
        assert in_memory.is_dir()
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    code, status = SIGNALS[number]
    assert (process.returncode, err) == (code, "")
    assert remains([process.pid, *children], [folder, in_memory]) == []
    if status is not None:
        assert list(read_events(out / EVENTS))[-1]["status"] == status


def test_a_run_whose_terminal_is_closed_saves_and_stops(tmp_path):
    out = tmp_path / "run"
    where = words_of(DP2, steps=1_000_000, out=out, data__source=write_text(tmp_path))
    words = ("train", *MODEL, *SEQUENCES, *where)
    terminal, end_of_program = pty.openpty()
    with programs().running(WEFT, *words, terminal=end_of_program) as process:
        os.close(end_of_program)
        wait_for_rank(out, 0, has_done_steps)
        os.close(terminal)
        assert process.wait(PATIENCE_S) == EXIT_PREEMPTED
    end = list(read_events(out / EVENTS))[-1]
    assert end["status"] == "stopped"
    assert Path(end["checkpoint"]).is_dir()


@pytest.mark.slow
def test_a_suspended_run_goes_on_without_a_restart(tmp_path):
    out = tmp_path / "run"
    with training(out, *words_of(DP2, steps=1_000_000)) as process:
        wait_for_rank(out, 0, lambda rank: rank.step >= 12)
        for number in (signal.SIGTSTP, signal.SIGSTOP):
            process.send_signal(number)
            time.sleep(4.0)
            process.send_signal(signal.SIGCONT)
            step = wait_for_rank(out, 0, has_done_steps).step
            wait_for_rank(out, 0, lambda rank, step=step: rank.step >= step + 5)
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert "restart" not in [event["event"] for event in read_events(out / EVENTS)]


def has_done_steps(rank: RankSnapshot) -> bool:
    return rank.step >= 3
