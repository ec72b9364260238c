"""Checkpoints: seconds that a save stops training, and MiB/s of save and load, compared with torch.distributed.checkpoint.

python benchmarks/checkpoint.py [--mib 256] [--rounds 7] [--folder /tmp]

One process writes the shards of two ranks of float32 matrices to two files. A round runs every operation once, in reversed
order within each pair in every other round. Both libraries flush their files to disk. Loads read the page cache into new
memory; weft verifies all checksums, torch.distributed.checkpoint has none.
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

NUM_RANKS = 2
ROWS = 1024
COLUMNS = 2048
MATRIX_MIB = 8

State = dict[str, Tensor]
Operation = Callable[[Path, State], None]


def rank_items(state: State, rank: int) -> list[WriteItem]:
    """The rows of every matrix that `rank` holds."""
    lo, hi = span(ROWS, NUM_RANKS, rank)
    box = Box(lo=(lo, 0), hi=(hi, COLUMNS))
    items = []
    for name, tensor in state.items():
        item = WriteItem(
            name=f"model/{name}",
            shape=(ROWS, COLUMNS),
            box=box,
            tensor=tensor[lo:hi],
        )
        items.append(item)
    return items


def weft_save(folder: Path, state: State) -> None:
    """Write and commit without a snapshot."""
    final = checkpoint_path(folder, 1)
    tmp = temporary_path(final)
    writes = []
    for rank in range(NUM_RANKS):
        write = start_write(tmp, rank, rank_items(state, rank))
        writes.append(write)
    for write in writes:
        write.wait()
    facts = Facts(
        step=1,
        seed=1,
        family="gpt2",
        architecture={},
        plan={},
    )
    commit(
        tmp,
        final,
        facts,
        ranks=NUM_RANKS,
    )


def weft_load(folder: Path, state: State) -> None:
    """Read every matrix whole and verify every checksum."""
    checkpoint = open_checkpoint(checkpoint_path(folder, 1))
    section = checkpoint.section("model")
    loaded = {}
    for name, tensor in state.items():
        loaded[name] = section.read(name, Box.whole(tensor.shape))
    assert loaded.keys() == state.keys()


def torch_save(folder: Path, state: State) -> None:
    """Write as many files as ranks, flushed."""
    writer = dcp.FileSystemWriter(
        folder / "dcp",
        single_file_per_rank=True,
        sync_files=True,
        thread_count=NUM_RANKS,
    )
    dcp.save(state, storage_writer=writer, no_dist=True)


def torch_load(folder: Path, state: State) -> None:
    """Read every matrix into new memory."""
    loaded = {}
    for name, tensor in state.items():
        loaded[name] = torch.empty_like(tensor)
    reader = dcp.FileSystemReader(folder / "dcp")
    dcp.load(loaded, storage_reader=reader, no_dist=True)


def plain_copy(_: Path, state: State) -> None:
    """Clone each tensor into new memory."""
    copies = [tensor.clone() for tensor in state.values()]
    assert copies


def weft_snapshot(_: Path, state: State) -> None:
    """The part of a save that training waits for."""
    snapshots = [snapshot(rank_items(state, rank)) for rank in range(NUM_RANKS)]
    assert snapshots


OPERATIONS: dict[str, Operation] = {
    "plain copy": plain_copy,
    "snapshot": weft_snapshot,
    "save, weft": weft_save,
    "save, torch": torch_save,
    "load, weft": weft_load,
    "load, torch": torch_load,
}
ORDER = (
    ("plain copy", "snapshot"),
    ("save, weft", "save, torch"),
    ("load, weft", "load, torch"),
)
"""Pairs that run one after the other."""

RATIOS = (
    ("snapshot", "plain copy"),
    ("save, weft", "save, torch"),
    ("load, weft", "load, torch"),
)
"""Numerator and denominator of the printed ratios."""


@dataclass(frozen=True)
class Seconds:
    """Time of one run of an operation.

    Attributes:
        cpu: user + system of all threads of this process; other programs are not included.
    """

    wall: float
    cpu: float


Round = dict[str, Seconds]
"""By operation."""


def measure(
    operation: Operation,
    folder: Path,
    state: State,
) -> Seconds:
    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    operation(folder, state)
    wall = time.perf_counter() - wall_start
    cpu = time.process_time() - cpu_start
    return Seconds(wall, cpu)


def run_round(
    folder: Path,
    state: State,
    *,
    is_reversed: bool,
) -> Round:
    """Every operation once; `is_reversed` swaps the two operations of each pair."""
    seconds: Round = {}
    for pair in ORDER:
        names = reversed(pair) if is_reversed else pair
        for name in names:
            seconds[name] = measure(OPERATIONS[name], folder, state)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of all tensors, MiB")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of all operations")
    parser.add_argument(
        "--folder", default=None, help="where checkpoints are written; default: a temporary folder"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    state: State = {}
    for layer in range(args.mib // MATRIX_MIB):
        state[f"layer{layer}.weight"] = torch.randn(ROWS, COLUMNS)
    rounds = []
    for number in range(args.rounds + 1):
        is_reversed = number % 2 == 1
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            seconds = run_round(Path(folder), state, is_reversed=is_reversed)
        if number > 0:  # the first round is a warm-up
            rounds.append(seconds)
    print_medians(rounds, args.mib)
    print_ratios(rounds)


def print_medians(rounds: Sequence[Round], mib: int) -> None:
    """Median seconds and rate of every operation."""
    for name in OPERATIONS:
        seconds = [times[name] for times in rounds]
        wall_s = statistics.median(each.wall for each in seconds)
        cpu_s = statistics.median(each.cpu for each in seconds)
        wall_ms = 1e3 * wall_s
        cpu_ms = 1e3 * cpu_s
        rate = mib / wall_s
        print(f"{name:12} {wall_ms:7.1f} ms, {cpu_ms:7.1f} ms of CPU, {rate:6.0f} MiB/s")


def print_ratios(rounds: Sequence[Round]) -> None:
    """Medians of the ratios within rounds."""
    for left, right in RATIOS:
        wall_ratios = []
        cpu_ratios = []
        for seconds in rounds:
            left_s = seconds[left]
            right_s = seconds[right]
            wall_ratios.append(left_s.wall / right_s.wall)
            cpu_ratios.append(left_s.cpu / right_s.cpu)
        wall = statistics.median(wall_ratios)
        cpu = statistics.median(cpu_ratios)
        print(f"{left} / {right}: time {wall:.2f}, CPU {cpu:.2f}")


if __name__ == "__main__":
    main()
