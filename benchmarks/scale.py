"""Cost of starting a world: counted for one rank of up to 16,384, measured with up to 256 local processes.

python -m benchmarks.scale count      [--worlds 64 1024 16384]
python -m benchmarks.scale measure    [--worlds 8 32 64]

`count` builds a training run of one rank and trains two steps with the code of `weft train`, on a
transport that has no other ranks and records the groups; each group then connects on a store in
memory that counts requests. A step's signatures are compared as on processes. `measure` runs
`weft train --steps 3`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from weft.comm.comm import Comm
from weft.comm.group import QueueKey
from weft.comm.signature import TEXT_BYTES
from weft.comm.transport import Call, GroupKey, MetaTransport, OnLate
from weft.comm.world_store import PresenceStore
from weft.config.load import load
from weft.models import FAMILIES
from weft.train.build_training import build_training
from weft.train.loop import step_events

MESHES = {
    8: "dp2 pp2 tp2",
    16: "dp4 pp2 tp2",
    32: "dp8 pp2 tp2",
    64: "dp8 pp4 tp2",
    128: "dp16 pp4 tp2",
    256: "dp16 pp4 tp4",
    1024: "dp32 pp8 tp4",
    4096: "dp64 pp8 tp8",
    16_384: "dp128 pp16 tp8",
}
COUNTED_WORLDS = (8, 64, 256, 1024, 4096, 16_384)
MEASURED_WORLDS = (8, 16, 32, 64)
DIGEST_BYTES = 16
MAX_RANKS_COMPARED_BY_TEXT = 8
WEFT = str(Path(sys.executable).parent / "weft")
TINY = {
    "model.layers": 16,
    "model.dim": 32,
    "model.heads": 8,
    "model.kv_heads": 8,
    "model.ffn": 32,
    "data.seq_len": 8,
    "batch.micro_size": 1,
}


@dataclass
class CountingStore:
    """A store in memory in which the other members of a group have arrived already."""

    values: dict[str, bytes] = field(default_factory=dict)
    num_requests: int = 0
    num_bytes: int = 0

    def set(self, key: str, value: str) -> None:
        self._count(key)
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._count(key)
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def _count(self, *keys: str) -> None:
        self.num_requests += len(keys)
        self.num_bytes += sum(map(len, keys))


class RecordingTransport(MetaTransport):
    """Completes every call at once, as if all members passed what this rank does, and remembers the
    first call of each group.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank, device="cpu")
        self.first_calls: dict[GroupKey, Call] = {}
        self.num_checked_bytes = 0

    def start(self, call: Call, on_late: OnLate) -> None:
        self.first_calls.setdefault(call.group_key, call)
        if call.checked:
            self.num_checked_bytes += signature_bytes(len(call.ranks))
        super().start(call, on_late)
        if call.op == "all_gather":
            own = call.required_input
            for slot in call.required_output.split(list(call.output_split_sizes)):
                slot.copy_(own[: len(slot)])


def signature_bytes(num_members: int) -> int:
    """Bytes that one member receives to compare the signatures of a call."""
    if num_members > MAX_RANKS_COMPARED_BY_TEXT:
        return DIGEST_BYTES
    return num_members * (TEXT_BYTES + 16 * num_members)


@dataclass(frozen=True)
class StartupCost:
    """What one rank needs until its second step is done."""

    groups: int
    sockets: int
    store_requests: int
    store_key_bytes: int
    signature_bytes: int
    seconds: float


def flags_of(world_size: int) -> dict[str, object]:
    mesh = MESHES[world_size]
    first_axis = mesh.split()[0]
    num_data_ranks = int(first_axis.removeprefix("dp"))
    return {**TINY, "mesh": mesh, "batch.global_size": 4 * num_data_ranks, "steps": 2}


def count(world_size: int) -> StartupCost:
    """The cost of rank 0 of a world."""
    with tempfile.TemporaryDirectory() as folder:
        flags = flags_of(world_size) | {"out": folder, "device": "cpu"}
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        run = load(words, FAMILIES)
        rank = 0
        transport = RecordingTransport(world_size, rank)
        start = time.perf_counter()
        comm = Comm(run.device_mesh, rank, transport)
        training = build_training(run, comm, stop_requested=lambda: False)
        for _ in step_events(training.step, training.loader, training.step_range):
            pass
        seconds = time.perf_counter() - start
    store = CountingStore()
    for call in transport.first_calls.values():
        name = QueueKey.of(call).name
        store.values[f"{name}/arrived"] = str(len(call.ranks) - 1).encode()
        PresenceStore(store).wait_for_members(name, call, timeout_s=1.0)
    return StartupCost(
        groups=len(transport.first_calls),
        sockets=sum(len(call.ranks) - 1 for call in transport.first_calls.values()),
        store_requests=store.num_requests,
        store_key_bytes=store.num_bytes,
        signature_bytes=transport.num_checked_bytes,
        seconds=seconds,
    )


@dataclass(frozen=True)
class MeasuredStart:
    """A three-step run of local processes."""

    seconds: float
    peak_threads: int
    peak_sockets: int
    peak_memory_mib: float


def measure(world_size: int) -> MeasuredStart:
    with tempfile.TemporaryDirectory() as folder:
        flags = flags_of(world_size) | {"out": f"{folder}/run", "steps": 3, "save.at_end": False}
        flags |= {"prove.before": "never"}  # the ranks alone are measured
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = [WEFT, "train", "--device", "cpu", *words]
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        with sampling(process.pid) as peaks:
            _, errors = process.communicate()
        seconds = time.perf_counter() - start
        assert process.returncode == 0, errors.decode()
    return MeasuredStart(seconds, peaks.threads, peaks.sockets, peaks.memory_mib)


@dataclass
class Peaks:
    """Largest values seen in the process of the last rank; memory that it shares with no other."""

    threads: int = 0
    sockets: int = 0
    memory_mib: float = 0.0


@contextmanager
def sampling(pid: int) -> Iterator[Peaks]:
    """Look at the children of a process every two seconds."""
    peaks = Peaks()
    done = threading.Event()

    def look() -> None:
        while not done.wait(2.0):
            look_once(pid, peaks)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def look_once(pid: int, peaks: Peaks) -> None:
    try:
        last = psutil.Process(pid).children()[-1]
        num_threads = last.num_threads()
        num_sockets = len(last.net_connections())
        own_bytes = last.memory_full_info().uss
    except (psutil.Error, IndexError):
        return
    peaks.threads = max(peaks.threads, num_threads)
    peaks.sockets = max(peaks.sockets, num_sockets)
    peaks.memory_mib = max(peaks.memory_mib, own_bytes / 2**20)


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "what",
        choices=["count", "measure"],
        help="`count` for one rank, `measure` with local processes",
    )
    parser.add_argument("--worlds", type=int, nargs="+", help="numbers of ranks")
    args = parser.parse_args()
    if args.what == "count":
        print(
            "| ranks | mesh | groups | sockets | store requests | key bytes | signature bytes | s |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for size in args.worlds or COUNTED_WORLDS:
            cost = count(size)
            print(
                f"| {size:,} | {MESHES[size]} | {cost.groups} | {cost.sockets} | {cost.store_requests} "
                f"| {cost.store_key_bytes:,} | {cost.signature_bytes:,} | {cost.seconds:.2f} |",
                flush=True,
            )
        return
    print("| ranks | mesh | 3 steps, s | threads a rank | sockets a rank | memory a rank, MiB |")
    print("|---|---|---|---|---|---|")
    for size in args.worlds or MEASURED_WORLDS:
        run = measure(size)
        print(
            f"| {size} | {MESHES[size]} | {run.seconds:.1f} | {run.peak_threads} | {run.peak_sockets} "
            f"| {run.peak_memory_mib:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
