"""Checkpoints: how long a save stops training, and rates of save and load against torch.distributed.checkpoint.

python benchmarks/checkpoint.py [--mib 256] [--rounds 7] [--folder /tmp]

One process, one state of float32 matrices, two files. Turn by turn: a round does everything once, the order reversed in every
other round. Both sides flush their files to the disk. Loads find them in the page cache and fill memory of their own; ours
compare all checksums, theirs have none.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from weft.checkpoint.commit import commit
from weft.checkpoint.folder import checkpoint_path, temporary_path
from weft.checkpoint.format import Facts
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem, snapshot
from weft.core.axes import Box, span

RANKS = 2
ROWS, COLUMNS = 1024, 2048
"""Of a matrix: 8 MiB."""

State = dict[str, Tensor]


def held_by(state: State, rank: int) -> list[WriteItem]:
    """Half of the rows of every matrix."""
    lo, hi = span(ROWS, RANKS, rank)
    box = Box((lo, 0), (hi, COLUMNS))
    return [WriteItem(f"model/{name}", (ROWS, COLUMNS), box, tensor[lo:hi]) for name, tensor in state.items()]


def weft_save(folder: Path, state: State) -> None:
    """Write and commit what is a snapshot already."""
    final = checkpoint_path(folder, 1)
    writings = [start_write(temporary_path(final), rank, held_by(state, rank)) for rank in range(RANKS)]
    for writing in writings:
        writing.wait()
    commit(temporary_path(final), final, Facts(step=1, seed=1, family="gpt2", architecture={}, plan={}), ranks=RANKS)


def weft_load(folder: Path, state: State) -> None:
    """Every matrix, whole, every checksum compared."""
    source = open_checkpoint(checkpoint_path(folder, 1)).section("model")
    loaded = {name: source.read(name, Box.whole(tensor.shape)) for name, tensor in state.items()}
    assert loaded.keys() == state.keys()


def torch_save(folder: Path, state: State) -> None:
    """As many files as ranks, flushed."""
    writer = dcp.FileSystemWriter(folder / "dcp", single_file_per_rank=True, sync_files=True, thread_count=RANKS)
    dcp.save(state, storage_writer=writer, no_dist=True)


def torch_load(folder: Path, state: State) -> None:
    """Into fresh memory, as ours."""
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)


def cloned(_: Path, state: State) -> None:
    """The plain copy: fresh memory, tensor by tensor."""
    assert [tensor.clone() for tensor in state.values()]


def stalled(_: Path, state: State) -> None:
    """What training waits for at a save."""
    assert [snapshot(held_by(state, rank)) for rank in range(RANKS)]


JOBS: dict[str, Callable[[Path, State], None]] = {
    "plain copy": cloned,
    "snapshot": stalled,
    "save, weft": weft_save,
    "save, torch": torch_save,
    "load, weft": weft_load,
    "load, torch": torch_load,
}


@dataclass(frozen=True)
class Cost:
    """Of doing a job once."""

    wall_s: float
    cpu_s: float
    """Of all threads, system calls included: other programs on the machine do not count."""


def cost(job: Callable[[Path, State], None], folder: Path, state: State) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    job(folder, state)
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def a_round(folder: Path, state: State, *, turned: bool) -> dict[str, Cost]:
    """Every job once; `turned`: within each pair the second goes first."""
    names = list(JOBS)
    pairs = [names[at : at + 2] for at in range(0, len(names), 2)]
    return {name: cost(JOBS[name], folder, state) for pair in pairs for name in (pair[::-1] if turned else pair)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    state = {f"layer{i}.weight": torch.randn(ROWS, COLUMNS) for i in range(given.mib // 8)}
    rounds = []
    for turn in range(given.rounds + 1):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rounds.append(a_round(Path(folder), state, turned=bool(turn % 2)))
    show(rounds[1:], given.mib)  # the first round warms up


def show(rounds: Sequence[dict[str, Cost]], mib: int) -> None:
    """Medians of every job, and of the ratios within rounds."""
    for job in JOBS:
        wall, cpu = (statistics.median(getattr(each[job], kind) for each in rounds) for kind in ("wall_s", "cpu_s"))
        print(f"{job:12} {1e3 * wall:7.1f} ms, {1e3 * cpu:7.1f} ms of CPU, {mib / wall:6.0f} MiB/s")
    for left, right in (("snapshot", "plain copy"), ("save, weft", "save, torch"), ("load, weft", "load, torch")):
        wall = statistics.median(each[left].wall_s / each[right].wall_s for each in rounds)
        cpu = statistics.median(each[left].cpu_s / each[right].cpu_s for each in rounds)
        print(f"{left} / {right}: time {wall:.2f}, CPU {cpu:.2f}")


if __name__ == "__main__":
    main()
