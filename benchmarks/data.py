"""Memory of preparing and training on text files of growing size, and the step time with and without prefetching.

    python benchmarks/data.py memory [--mb 100 1000] [--tokenizer bytes] [--folder /tmp/x]
    python benchmarks/data.py prefetch [--steps 10 --rounds 6 --slow-ms 0]

`memory` writes a text of each size in megabytes, runs `weft data prepare` and `weft train` on it as processes and prints the
peak resident set of each as measured by the kernel. `prefetch` runs the same steps with and without prefetching in turns
(A B A B ...), and prints the time of reading alone; `--slow-ms` adds a delay to the reading of each step, as of remote storage.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from weft.data.files import stdlib_files

if TYPE_CHECKING:  # `memory` must not import torch: the peak of a process includes what its parent held before exec
    from weft.comm.comm import Comm
    from weft.models.common.batch import Batch
    from weft.train.step import TrainStep

MEMORY_STEPS = 5
MEGABYTE = 10**6
MIB = 2**20
PREFETCH_TEXT_BYTES = 5 * MEGABYTE
NO_PREFETCH = 0
PREFETCH = 2
"""Steps read ahead."""


class Usage(NamedTuple):
    """Wall-clock seconds and peak resident bytes of a command, measured."""

    seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.seconds:6.1f} s  peak {self.peak_bytes / MIB:6.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("memory", "prefetch"), help="the measurement")
    parser.add_argument(
        "--mb",
        type=int,
        nargs="+",
        default=[100, 1000],
    )
    parser.add_argument("--tokenizer", default="bytes", help="`bytes`, or a tokenizer file")
    parser.add_argument(
        "--folder", default=None, help="where texts are written; default: a temporary folder"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns with and without prefetching")
    parser.add_argument(
        "--slow-ms", type=float, default=0.0, help="delay of reading each step, milliseconds"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.what == "memory":
            for megabytes in args.mb:
                measure_memory(folder, megabytes, args.tokenizer)
        else:
            measure_prefetch(
                folder,
                args.steps,
                args.rounds,
                delay_s=args.slow_ms / 1e3,
            )


def measure_memory(
    folder: Path,
    megabytes: int,
    tokenizer: str,
) -> None:
    text = folder / f"{megabytes}.txt"
    prepared = folder / f"{megabytes}"
    write_text(text, megabytes * MEGABYTE)
    prepare_usage = run_weft(prepare_command(text, prepared, tokenizer))
    out = folder / f"run{megabytes}"
    train_usage = run_weft(train_command(prepared, out, tokenizer))
    token_file = prepared / "train.bin"
    bytes_per_token = 2
    num_tokens = token_file.stat().st_size // bytes_per_token
    columns = [
        f"{megabytes:>5} MB",
        f"  data {prepare_usage}",
        f" train {train_usage}",
        f"{num_tokens / 1e6:,.0f} M tokens",
    ]
    print("  ".join(columns), flush=True)
    text.unlink()
    token_file.unlink()


def prepare_command(
    text: Path,
    out: Path,
    tokenizer: str,
) -> list[str]:
    options = {"--out": str(out), "--split_on": "blank", "--tokenizer": tokenizer}
    return ["data", "prepare", str(text), *flags(options)]


def train_command(
    prepared: Path,
    out: Path,
    tokenizer: str,
) -> list[str]:
    vocab = 256 if tokenizer == "bytes" else 8192
    options = {
        "--steps": str(MEMORY_STEPS),
        "--data.packing": "documents",
        "--model.vocab": str(vocab),
        "--data.source": str(prepared),
        "--out": str(out),
    }
    return ["train", *flags(options)]


def flags(options: dict[str, str]) -> list[str]:
    words = []
    for name, value in options.items():
        words.append(name)
        words.append(value)
    return words


def write_text(file: Path, size: int) -> None:
    """Write the source of the standard library repeatedly, with a different number in its names each time."""
    sources = [path.read_text() for path in stdlib_files()]
    written = 0
    repetition = 0
    with file.open("w") as out:
        while written < size:
            for number, source in enumerate(sources):
                renamed = source.replace("self", f"self{repetition}")
                block = f"{renamed}\n# {repetition} {number}\n\n"
                remaining = max(size - written, 0)
                out.write(block[:remaining])
                written += len(block)
            repetition += 1


def run_weft(arguments: Sequence[str]) -> Usage:
    """Run `weft ARGUMENTS` as a process; the peak is that of its largest process."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (
        f"weft {' '.join(arguments)} ended with exit code {process.returncode}"
    )
    seconds = time.perf_counter() - start
    return Usage(seconds, usage.ru_maxrss * 1024)


def prefetch_options(prepared: Path) -> list[str]:
    options = {
        "--data.source": str(prepared),
        "--data.packing": "documents",
        "--model.layers": "1",
        "--model.dim": "64",
        "--data.seq_len": "256",
        "--batch.global_size": "32",
        "--batch.micro_size": "8",
    }
    return flags(options)


def measure_prefetch(
    folder: Path,
    steps: int,
    rounds: int,
    *,
    delay_s: float,
) -> None:
    from weft.config.load import load
    from weft.data.dataset import open_data
    from weft.models import FAMILIES
    from weft.testing import run_ranks
    from weft.train.build import build_data_loader
    from weft.train.build_training import build_step

    text = folder / "text.txt"
    prepared = folder / "prepared"
    write_text(text, PREFETCH_TEXT_BYTES)
    run_weft(["data", "prepare", str(text), "--out", str(prepared), "--split_on", "blank"])
    run = load(prefetch_options(prepared), FAMILIES)

    def rank_main(comm: Comm) -> None:
        train_step = build_step(run, comm)
        loader = build_data_loader(
            open_data(run.data, run.model),
            comm,
            run.batch,
            seed=run.seed,
            later=run.model.reads_later_targets,
        )

        def read(number: int) -> list[Batch]:
            time.sleep(delay_s)
            return loader.batches(number)

        train_step(loader.batches(0), lr=1e-3)
        step_s: dict[int, list[float]] = {NO_PREFETCH: [], PREFETCH: []}
        first = 0
        for _ in range(rounds):
            for depth in (NO_PREFETCH, PREFETCH):
                numbers = range(first, first + steps)
                seconds = time_steps(
                    train_step,
                    read,
                    numbers,
                    depth=depth,
                )
                step_s[depth].append(seconds)
                first += steps
        read_s = time_reading(read, steps)
        print_prefetch(step_s, read_s=read_s)

    run_ranks("", rank_main, timeout_s=3600)


def time_steps(
    train_step: TrainStep,
    read: Callable[[int], list[Batch]],
    numbers: range,
    *,
    depth: int,
) -> float:
    """Seconds a step with `depth` steps read ahead."""
    from weft.train.data_loader import prefetch

    with prefetch(read, numbers, most=depth) as batches:
        start = time.perf_counter()
        for batch in batches:
            train_step(batch, lr=1e-3)
        seconds = time.perf_counter() - start
    return seconds / len(numbers)


def time_reading(read: Callable[[int], list[Batch]], steps: int) -> float:
    """Seconds a step of reading alone."""
    start_s = time.perf_counter()
    for number in range(steps):
        read(number)
    elapsed_s = time.perf_counter() - start_s
    return elapsed_s / steps


def print_prefetch(step_s: dict[int, list[float]], *, read_s: float) -> None:
    without_s = step_s[NO_PREFETCH]
    prefetch_s = step_s[PREFETCH]
    ratios = []
    for without, with_prefetch in zip(without_s, prefetch_s, strict=True):
        ratios.append(with_prefetch / without)
    without_ms = 1e3 * statistics.median(without_s)
    prefetch_ms = 1e3 * statistics.median(prefetch_s)
    ratio = statistics.median(ratios)
    read_ms = 1e3 * read_s
    print(
        f"measured: {without_ms:.1f} ms a step without prefetching, {prefetch_ms:.1f} ms with it,"
    )
    print(
        f"ratio {ratio:.3f} (median of neighbouring rounds); reading alone {read_ms:.2f} ms a step"
    )


if __name__ == "__main__":
    main()
