"""NCCL as it orders calls, for rank threads and tensors on the CPU: kernels of a communicator run one after the other.

A kernel is a collective, or the messages between the start and the end of a group. It ends when all its members have
come to it; of a group of messages, when the other side of each is at a kernel with its counterpart. A wait blocks the
host until then, which is stricter than NCCL's: what does not deadlock here does not deadlock there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp

from weft.comm.backends import ABORT_TAG
from weft.comm.process_groups import ProcessTransport
from weft.comm.transport import Call

DEADLOCK_S = 10.0


@dataclass
class Kernel:
    """One rank's part of a collective (`exchange` is not None) or of a group of messages."""

    name: str
    tensors: tuple[Tensor, ...] = ()
    exchange: Callable[[list[Kernel]], None] | None = None
    sends: dict[int, Tensor] = field(default_factory=dict)
    recvs: dict[int, Tensor] = field(default_factory=dict)
    is_done: bool = False


@dataclass
class Communicator:
    """Kernels that each member has launched and that have not ended, in order."""

    size: int
    queues: dict[int, deque[Kernel]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    splits: list[dict[int, int]] = field(default_factory=list)

    def launch(self, rank: int, kernel: Kernel) -> None:
        self.queues.setdefault(rank, deque()).append(kernel)
        while self._progress():
            pass

    def _progress(self) -> bool:
        heads = {rank: queue[0] for rank, queue in self.queues.items() if queue}
        for rank, kernel in heads.items():
            for to in [to for to in kernel.sends if to in heads and rank in heads[to].recvs]:
                heads[to].recvs.pop(rank).copy_(kernel.sends.pop(to))
        collectives = [kernel for kernel in heads.values() if kernel.exchange is not None]
        if len(collectives) == self.size:
            names = {kernel.name for kernel in collectives}
            assert len(names) == 1, f"members launched different kernels: {names}"
            members = [heads[rank] for rank in range(self.size)]
            exchange = members[0].exchange
            assert exchange is not None
            exchange(members)
            for kernel in members:
                kernel.exchange = None
        ended = [
            rank
            for rank, kernel in heads.items()
            if kernel.exchange is None and not kernel.sends and not kernel.recvs
        ]
        for rank in ended:
            self.queues[rank].popleft().is_done = True
        return bool(ended)


class World:
    """What all ranks share: the communicators by number, and one lock."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.communicators: list[Communicator] = []

    def wait_for(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLOCK_S
        while not is_true():
            if not self.changed.wait(deadline - time.monotonic()):
                raise RuntimeError(f"deadlock: {what}")


@dataclass
class Work:
    """A launched kernel."""

    world: World
    kernel: Kernel

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self.world.changed:
            self.world.wait_for(lambda: self.kernel.is_done, self.kernel.name)
        return True

    def is_completed(self) -> bool:
        return self.kernel.is_done


class FakeNccl:
    """ProcessGroupNCCL of one rank thread; `world` is set by each test."""

    world: ClassVar[World]

    class Options:
        """Of a process group."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout: timedelta | None = None
            self.split_from: FakeNccl | None = None
            self.split_color = 0

    def __init__(self, store: Any, rank: int, size: int, options: FakeNccl.Options) -> None:
        self.rank = rank
        self.options = options
        self.num_splits = 0
        self.group: Kernel | None = None
        with self.world.changed:
            if store.add("made", 1) == 1:
                store.set("number", str(len(self.world.communicators)))
                self.world.communicators.append(Communicator(size))
        self.communicator = self.world.communicators[int(store.get("number"))]

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.options.split_from is not None:
            assert self.options.split_color > 0
            colors = self.options.split_from.split(self.options.split_color)
            num_members = sum(color == self.options.split_color for color in colors.values())
            assert num_members == self.communicator.size

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.split(-1)

    def split(self, color: int) -> dict[int, int]:
        """All ranks of this communicator meet; returns their colors."""
        splits = self.communicator.splits
        number = self.num_splits
        self.num_splits += 1
        with self.world.changed:
            if number == len(splits):
                splits.append({})
            splits[number][self.rank] = color
            self.world.changed.notify_all()
            self.world.wait_for(
                lambda: len(splits[number]) == self.communicator.size, f"split {number}"
            )
        return splits[number]

    def _launch(self, kernel: Kernel) -> Work:
        assert self.group is None, "a collective inside a group of messages"
        with self.world.changed:
            self.communicator.log.append(kernel.name)
            self.communicator.launch(self.rank, kernel)
            self.world.changed.notify_all()
        return Work(self.world, kernel)

    def _start_coalescing(self) -> None:
        self.group = Kernel("messages")

    def _end_coalescing(self) -> Work:
        assert self.group is not None
        kernel, self.group = self.group, None
        sends = list(kernel.sends)
        recvs = list(kernel.recvs)
        kernel.name = f"messages of {self.rank}: to {sends}, from {recvs}"
        return self._launch(kernel)

    def send(self, xs: list[Tensor], to: int, tag: int) -> None:
        assert self.group is not None, "a message outside of a group"
        self.group.sends[to] = xs[0]

    def recv(self, xs: list[Tensor], source: int, tag: int) -> Work:
        if tag == ABORT_TAG:  # how a group of CPU tensors is closed
            return Work(self.world, Kernel("abort", is_done=True))
        assert self.group is not None, "a message outside of a group"
        self.group.recvs[source] = xs[0]
        return Work(self.world, self.group)

    def allreduce(self, tensors: list[Tensor], op: object) -> Work:
        def exchange(members: list[Kernel]) -> None:
            total = _reduced([member.tensors[0] for member in members], op)
            for member in members:
                member.tensors[0].copy_(total)

        x = tensors[0]
        name = f"allreduce {x.dtype} {x.numel()}"
        return self._launch(Kernel(name, (x,), exchange))

    def _allgather_base(self, out: Tensor, x: Tensor) -> Work:
        def exchange(members: list[Kernel]) -> None:
            whole = torch.cat([member.tensors[1] for member in members])
            for member in members:
                member.tensors[0].copy_(whole)

        return self._launch(Kernel(f"allgather {x.numel()}", (out, x), exchange))

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: Any) -> Work:
        def exchange(members: list[Kernel]) -> None:
            tensors = [member.tensors[1] for member in members]
            total = _reduced(tensors, options.reduceOp)
            for member, shard in zip(members, total.chunk(len(members)), strict=True):
                member.tensors[0].copy_(shard)

        return self._launch(Kernel(f"reduce_scatter {out.numel()}", (out, x), exchange))

    def alltoall_base(self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int]) -> Work:
        def exchange(members: list[Kernel]) -> None:
            pieces = [member.tensors[2:] for member in members]
            for place, member in enumerate(members):
                parts = [row[place] for row in pieces]
                member.tensors[0].copy_(torch.cat(parts))

        own_pieces = torch.split(x, list(sizes))
        return self._launch(Kernel("alltoall", (out, x, *own_pieces), exchange))

    def broadcast(self, x: Tensor, root: int) -> Work:
        def exchange(members: list[Kernel]) -> None:
            for member in members:
                member.tensors[0].copy_(members[root].tensors[0])

        return self._launch(Kernel(f"broadcast {root}", (x,), exchange))

    def abort(self) -> None:
        """Nothing runs on a device."""

    def shutdown(self) -> None:
        """Nothing runs on a device."""


def _reduced(tensors: list[Tensor], op: object) -> Tensor:
    rows = torch.stack(tensors)
    if op == ReduceOp.SUM:
        return rows.sum(0)
    return rows.amax(0) if op == ReduceOp.MAX else rows.amin(0)


class FakeNcclTransport(ProcessTransport):
    """One rank thread, whose tensors on the CPU travel by `FakeNccl`."""

    def _connect(self, prefix: str, device_type: str, call: Call) -> Any:
        store = PrefixStore(prefix, self._store)
        color = min(call.ranks) + 1
        groups = self._nccl_groups()
        return groups.connect(store, index=call.index, size=len(call.ranks), color=color)
