"""`weft train` of a tiny model in a separate process: the state of its ranks, and faults at chosen places."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.programs import WEFT, Program, programs
from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.run.folder_lock import find_lock
from weft.run.rank_status import RankSnapshot, StatusBoard
from weft.train.event_lines import read_events, step_history
from weft.train.event_log import EVENTS

PATIENCE_S = 300


@contextmanager
def training(out: Path, *words: str, program: str = WEFT) -> Iterator[Program]:
    """`weft train` of a tiny model into `out`."""
    where = ("--data.source", str(write_text(out.parent)), "--out", str(out))
    with programs().running(program, "train", *MODEL, *SEQUENCES, *where, *words) as process:
        yield process


def finish(process: Program) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends by itself."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.wait(), out, err


def status_board(out: Path) -> StatusBoard:
    """The board of the run that writes into a folder."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lock = find_lock(out)
        if lock is not None and lock.holder is not None and lock.holder.status_board:
            return StatusBoard.open(Path(lock.holder.status_board))
        assert time.monotonic() < deadline, "no status board"
        time.sleep(0.01)


def wait_for_rank(out: Path, rank: int, is_there: Callable[[RankSnapshot], bool]) -> RankSnapshot:
    """The first look at a rank that satisfies a condition."""
    board = status_board(out)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        snapshot = board.read(rank)
        if snapshot.pid and is_there(snapshot):
            return snapshot
        assert time.monotonic() < deadline, f"rank {rank} is at {snapshot.place}"
        time.sleep(0.0005)


def send_signal(out: Path, rank: int, number: int, *, step: int) -> RankSnapshot:
    """Send a signal to a rank once it has reached a step."""
    snapshot = wait_for_rank(out, rank, lambda found: found.step >= step)
    os.kill(snapshot.pid, number)
    return snapshot


def numbers(out: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each step that counts."""
    history = step_history(read_events(out / EVENTS))
    return [(event["step"], event["loss"], event["grad_norm"]) for event in history]


def final_state(out: Path) -> dict[str, str]:
    """Hashes of the tensor files of the newest checkpoint."""
    folder = sorted((out / "ckpt").iterdir())[-1]
    hashes: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def words_of(layout: Sequence[str], **options: object) -> tuple[str, ...]:
    """Command line words: the layout, and options with `.` written as `__`."""
    words = list(layout)
    for name, value in options.items():
        words += [f"--{name.replace('__', '.')}", str(value)]
    return tuple(words)
