"""`weft train` in a process of its own: where its ranks are, and faults at chosen places."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weft.run.folder_lock import find_lock
from weft.run.rank_status import RankSnapshot, StatusBoard
from weft.train.event_log import EVENTS, read_events, step_history

PROGRAM = "import sys; from weft.cli import main; sys.exit(main())"
MODEL = ("--model.layers", "2", "--model.dim", "16", "--model.heads", "2", "--model.kv_heads", "2")
BATCH = ("--model.ffn", "32", "--data.seq_len", "8", "--batch.micro_size", "1")
PATIENCE_S = 300


@contextmanager
def training(out: Path, *words: str, program: str = PROGRAM) -> Iterator[subprocess.Popen[str]]:
    """`weft train` of a tiny model into `out`."""
    source = out.parent / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    where = ("--data.source", str(source), "--out", str(out))
    command = [sys.executable, "-c", program, "train", *MODEL, *BATCH, *where, *words]
    with subprocess.Popen(
        command, text=True, stdin=-1, stdout=-1, stderr=-1, process_group=0
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends by itself."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


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
