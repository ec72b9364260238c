"""Memory of preparing and training on texts of growing size, and what reading ahead brings.

    python benchmarks/data.py memory [--mb 100 1000] [--tokenizer bytes] [--folder /tmp/x]
    python benchmarks/data.py prefetch [--steps 10 --rounds 6 --slow-ms 0]

`memory` writes a text of so many megabytes, runs `weft data prepare` and `weft train` on it as processes of their own and
tells the peak resident set of each, as the kernel counted it. `prefetch` trains the same steps with and without a reader
turn by turn (A B A B ...), and tells how long reading takes by itself; `--slow-ms` lets every step's reading wait so long, as
a far disk would.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from weft.data.files import stdlib_files

STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("memory", "prefetch"))
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slow-ms", type=float, default=0.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.what == "memory":
            for size in args.mb:
                memory(Path(folder), size, args.tokenizer)
        else:
            prefetch(Path(folder), args.steps, args.rounds, slow_s=args.slow_ms / 1e3)


def memory(folder: Path, size: int, tokenizer: str) -> None:
    text, prepared, vocab = folder / f"{size}.txt", folder / f"{size}", "256" if tokenizer == "bytes" else "8192"
    write_text(text, size * 10**6)
    train, found = f"train --steps {STEPS} --data.packing documents --model.vocab {vocab}", [f"{size:>5} MB"]
    for words in (
        ["data", "prepare", str(text), "--out", str(prepared), "--split_on", "blank", "--tokenizer", tokenizer],
        [*train.split(), "--data.source", str(prepared), "--out", str(folder / f"run{size}")],
    ):
        seconds, peak = run_alone(words)
        found.append(f"{words[0]:>6} {seconds:6.1f} s  peak {peak / 2**20:6.1f} MiB")
    tokens = (prepared / "train.bin").stat().st_size // 2
    print("  ".join([*found, f"{tokens / 1e6:,.0f} M tokens"]), flush=True)
    text.unlink()
    (prepared / "train.bin").unlink()


def write_text(file: Path, size: int) -> None:
    """The standard library again and again, each time with other numbers in it."""
    sources = [path.read_text() for path in stdlib_files()]
    written, turn = 0, 0
    with file.open("w") as out:
        while written < size:
            for number, source in enumerate(sources):
                block = source.replace("self", f"self{turn}") + f"\n# {turn} {number}\n\n"
                out.write(block[: max(size - written, 0)])
                written += len(block)
            turn += 1


def run_alone(words: Sequence[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of `weft WORDS`, the largest of its processes."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"weft {' '.join(words)} ended with {process.returncode}"
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def prefetch(folder: Path, steps: int, rounds: int, *, slow_s: float) -> None:
    from weft.comm.comm import Comm
    from weft.config.load import load
    from weft.data.dataset import open_data
    from weft.models import FAMILIES
    from weft.models.common.batch import Batch
    from weft.testing import run_ranks
    from weft.train.build import build_data_loader, build_step
    from weft.train.data_loader import prefetch

    text, prepared = folder / "text.txt", folder / "prepared"
    write_text(text, 5 * 10**6)
    run_alone(["data", "prepare", str(text), "--out", str(prepared), "--split_on", "blank"])
    words = ["--data.source", str(prepared), "--data.packing", "documents", "--model.layers", "1", "--model.dim", "64"]
    run = load([*words, "--data.seq_len", "256", "--batch.global_size", "32", "--batch.micro_size", "8"], FAMILIES)

    def rank(comm: Comm) -> None:
        step, feed = build_step(run, comm), build_data_loader(run, comm, open_data(run.data, run.model))
        times: dict[int, list[float]] = {0: [], 2: []}

        def read(number: int) -> list[Batch]:
            time.sleep(slow_s)
            return feed.batches(number)

        step(feed.batches(0), lr=1e-3)
        for turn in range(2 * rounds):
            most = (0, 2)[turn % 2]
            with prefetch(read, range(turn * steps, (turn + 1) * steps), most=most) as batches:
                start = time.perf_counter()
                for batch in batches:
                    step(batch, lr=1e-3)
                times[most].append((time.perf_counter() - start) / steps)
        start = time.perf_counter()
        for number in range(steps):
            read(number)
        reading = (time.perf_counter() - start) / steps
        alone, beside = (1e3 * statistics.median(times[most]) for most in (0, 2))
        ratio = statistics.median(b / a for a, b in zip(times[0], times[2], strict=True))
        print(f"a step: {alone:.1f} ms read as asked for, {beside:.1f} ms read ahead, ratio {ratio:.3f} (median of")
        print(f"neighbouring rounds); reading alone {1e3 * reading:.2f} ms")

    run_ranks("", rank, timeout_s=3600)


if __name__ == "__main__":
    main()
