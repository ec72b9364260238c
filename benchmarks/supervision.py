"""Faults of local ranks: detection, recovery and lost steps; false alarms under load; the cost of snapshots in memory.

python benchmarks/supervision.py faults --count 20      kills and stops, one after the other, in one run
python benchmarks/supervision.py alarms --minutes 20    a run beside 10 busy processes: restarts must be 0
python benchmarks/supervision.py cost                   step times without and with snapshots
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.run.folder_lock import find_lock
from weft.run.rank_status import StatusBoard
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

MODEL = "--model.layers 2 --model.dim 16 --model.heads 2 --model.kv_heads 2 --model.ffn 32"
BATCH = "--data.seq_len 8 --batch.global_size 6 --batch.micro_size 1"
BUSY = "while True: pass"
ENDLESS = 10**9
MIN_PROGRESS = 12
"""Steps between two faults: step times must be known before a hang is found quickly."""
POLL_S = 0.005


@contextmanager
def training(out: Path, words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`weft train` of a tiny model."""
    command = [sys.executable, "-m", "weft", "train", *MODEL.split(), *BATCH.split()]
    command += [*words.split(), "--out", str(out)]
    log = out.with_name("log").open("w")
    with subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()


def board_of(out: Path) -> StatusBoard:
    """The status board of the run, once it is there."""
    while True:
        lock = find_lock(out) if out.is_dir() else None
        if lock is not None and lock.holder is not None and lock.holder.status_board:
            return StatusBoard.open(Path(lock.holder.status_board))
        time.sleep(POLL_S)


def wait_for_step(
    board: StatusBoard,
    rank: int,
    *,
    attempt: int,
    above: int,
) -> int:
    """The step of a rank, once it has passed `above` steps in this attempt."""
    while True:
        found = board.read(rank)
        if found.attempt == attempt and found.step > above:
            return found.step
        time.sleep(POLL_S)


def faults(
    count: int,
    mesh: str,
    seed: int,
) -> dict[str, object]:
    """Kill or stop a random rank at a random moment, `count` times."""
    chance = random.Random(seed)
    lost: list[int] = []
    kinds: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        words = f"--steps {ENDLESS} --run.restarts {count} --save.memory_every 2 --mesh {mesh}"
        with training(out, words):
            board = board_of(out)
            start = 0
            for attempt in range(count):
                rank = chance.randrange(board.num_ranks)
                above = start + MIN_PROGRESS
                wait_for_step(
                    board,
                    rank,
                    attempt=attempt,
                    above=above,
                )
                time.sleep(chance.random() * 0.3)
                kind = chance.choice(("SIGKILL", "SIGSTOP"))
                step = board.read(rank).step
                os.kill(board.read(rank).pid, signal.Signals[kind])
                wait_for_step(
                    board,
                    rank,
                    attempt=attempt + 1,
                    above=0,
                )
                start = restarts_of(out)[-1]["step"]
                lost.append(step - 1 - start)
                kinds.append(kind)
            restarts = restarts_of(out)
    result: dict[str, object] = {"mesh": mesh, "injected": count, "survived": len(restarts)}
    for kind in sorted(set(kinds)):
        chosen = [event for event, name in zip(restarts, kinds, strict=True) if name == kind]
        for key in ("detected_s", "recovered_s"):
            seconds = [event[key] for event in chosen]
            result[f"{kind} {key}"] = spread(seconds)
    result["steps lost"] = spread(lost)
    return result


def restarts_of(out: Path) -> list[Any]:
    """The restarts of a run."""
    return [event for event in read_events(out / EVENTS) if event["event"] == "restart"]


def alarms(
    minutes: float,
    load: int,
    mesh: str,
) -> dict[str, object]:
    """Train beside `load` busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            words = f"--steps {ENDLESS} --eval.every 50 --eval.source {__file__} --eval.batches 4"
            with training(out, f"{words} --save.every 100 --mesh {mesh}") as process:
                deadline = time.monotonic() + 60 * minutes
                while time.monotonic() < deadline and process.poll() is None:
                    time.sleep(1)
                is_running = process.poll() is None
            kinds = [event["event"] for event in read_events(out / EVENTS)]
    finally:
        for process in busy:
            process.kill()
    return {
        "minutes": minutes,
        "load": load,
        "steps": kinds.count("step"),
        "false alarms": kinds.count("restart") + (not is_running),
    }


def cost(steps: int, mesh: str) -> dict[str, object]:
    """Median step time of one run of each kind, turn by turn."""
    result: dict[str, object] = {"mesh": mesh}
    with tempfile.TemporaryDirectory() as folder:
        for every in (0, 100, 10, 1):
            out = Path(folder, f"run{every}")
            size = "--model.dim 256 --model.ffn 1024 --data.seq_len 64"
            words = f"--steps {steps} --save.memory_every {every} --save.at_end False {size}"
            with training(out, f"{words} --mesh {mesh}") as process:
                process.wait()
            times = [
                event["step_s"] for event in read_events(out / EVENTS) if event["event"] == "step"
            ]
            result[f"ms a step, snapshot every {every}"] = round(
                1e3 * statistics.mean(times[10:]),
                2,
            )
    return result


def spread(values: Sequence[float]) -> str:
    """`median / max`."""
    return f"{statistics.median(values):.3g} median, {max(values):.3g} max"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("faults", "alarms", "cost"), help="the measurement")
    parser.add_argument("--mesh", default="dp3", help="mesh of the run")
    parser.add_argument("--count", type=int, default=20, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of faults")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the run, minutes")
    parser.add_argument("--load", type=int, default=10, help="busy processes beside the run")
    parser.add_argument("--steps", type=int, default=300, help="steps of each timed run")
    given = parser.parse_args()
    if given.what == "faults":
        result = faults(given.count, given.mesh, given.seed)
    elif given.what == "alarms":
        result = alarms(given.minutes, given.load, given.mesh)
    else:
        result = cost(given.steps, given.mesh)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
