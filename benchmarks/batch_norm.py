"""CPU seconds of training steps of a ResNet with BatchNorm, weft on one rank against a plain loop of torch, in turns.

    PYTHONPATH=src:. python -m benchmarks.batch_norm [--channels 32] [--rounds 20] [--statistics]

Both go through the same micro-batches, with one thread. CPU seconds of a thread exclude its waiting, so other programs on
the machine change the ratio little. With --statistics: steps of two ranks that normalise together (batch.statistics_size)
against those of two that do not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from weft.comm.comm import Comm
from weft.config.load import load
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward
from weft.prove.subject import Subject
from weft.testing import run_ranks

MODEL = Path(__file__).parents[1] / "tests" / "user_models" / "resnet.py"
LR = 1e-3


def plain_step(subject: Subject, batches: Sequence[Batch]) -> Callable[[], None]:
    """A step of a plain loop: torch's BatchNorm, AdamW and clipping."""
    blocks = subject.family.blocks(subject.model)
    params = [param for block in blocks.values() for param in block.parameters()]
    optimizer = torch.optim.AdamW(params, lr=LR, foreach=True)
    num_targets = sum(int(batch.num_targets()) for batch in batches)

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            (forward(blocks, batch) / num_targets).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def cpu_s(step: Callable[[], object]) -> float:
    """CPU seconds of a step on this thread."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def statistics_of_ranks(words: Sequence[str], *, rounds: int) -> None:
    """Print CPU seconds of a step of one of two ranks, with statistics of both and of each."""
    sizes = [("--batch.statistics_size", size) for size in ("16", "8")]
    subjects = [
        Subject.of(load([*words, "--mesh", "dp2", *each], FAMILIES), steps=1) for each in sizes
    ]

    def rank(comm: Comm) -> list[float]:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            runs = [each.build_training(comm, out=folder, resume=None) for each in subjects]
            batches = runs[0].loader.batches(0)
            times: list[list[float]] = [[], []]
            for _ in range(rounds):
                for run, found in zip(runs, times, strict=True):
                    found.append(cpu_s(lambda run=run: run.step(batches, lr=LR)))
        return [statistics.median(found) for found in times]

    together_s, apart_s = run_ranks("dp2", rank)[0]
    print(f"together {1e3 * together_s:.1f} ms, apart {1e3 * apart_s:.1f} ms: {together_s / apart_s:.3f}")


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--statistics", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = ("--batch.global_size", "32", "--batch.micro_size", "8", "--device", "cpu")
    words = (str(MODEL), *sizes, "--model.channels", str(options.channels))
    if options.statistics:
        statistics_of_ranks(words, rounds=options.rounds)
        return
    subject = Subject.of(load([*words, "--mesh", "dp1"], FAMILIES), steps=1)

    def rank(comm: Comm) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            training = subject.build_training(comm, out=folder, resume=None)
            batches = training.loader.batches(0)
            plain = plain_step(subject, batches)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(options.rounds):
                times[0].append(cpu_s(lambda: training.step(batches, lr=LR)))
                times[1].append(cpu_s(plain))
        return statistics.median(times[0]), statistics.median(times[1])

    ((own_s, plain_s),) = run_ranks("dp1", rank)
    print(f"weft {1e3 * own_s:.1f} ms, plain loop {1e3 * plain_s:.1f} ms: {own_s / plain_s:.3f}")


if __name__ == "__main__":
    main()
