"""Owns the processes transport: one rank a process, over gloo and NCCL. The only file that imports torch.distributed."""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as find_rendezvous

from weft.comm.board import Board, pauses
from weft.comm.channels import Channel
from weft.comm.transport import Call, Pending, Reduce
from weft.comm.wire import Backend, Line
from weft.errors import CommError, CommTimeout, Fault, LaunchError

# Note [Groups without a registry]
# Backends are made here one by one and not by `dist.new_group`: that keeps names and counters for the whole process, is
# not to be called from two threads, and wants every rank to make its groups in the same order. A backend needs nothing
# but a store in which its members find each other; so each group is connected when it is first used, in whatever order
# its members come to it, and several transports may live in one process, beside a world of torch.distributed's own.

_REDUCE: dict[Reduce, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class ProcessTransport:
    """This process's rank in a world of processes.

    Args:
        rendezvous: a torch Store that all ranks share, or where to find one: "env://" (the variables that torchrun
            sets), "tcp://host:port" (rank 0 listens there) or "file:///path" (a file that does not exist yet).
        device: where this rank computes. Tensors on the CPU travel over gloo, tensors on a CUDA device over NCCL.
        timeout_s: how long a rank waits for the others.

    Raises:
        LaunchError: no meeting place: a variable is missing, a port is taken, the host does not answer.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: str | Store = "env://",
        *,
        device: str | torch.device = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.size, self.device, self.timeout_s = rank, size, torch.device(device), timeout_s
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._gloo_devices = _gloo_devices()
        self._store = _own_corner(_store_of(rendezvous, rank, size, timeout_s), rank)
        self._board = Board(self._store)
        self._channels: dict[tuple[bool, tuple[int, ...]], Channel] = {}
        self._finalizer = weakref.finalize(self, _close, self._board, self._channels, rank)

    @staticmethod
    def adopt(*, device: str | torch.device = "cpu", timeout_s: float = 600.0) -> ProcessTransport:
        """Be the rank that `torch.distributed.init_process_group` has made of this process.

        Raises:
            LaunchError: nobody has.
        """
        if not dist.is_available() or not dist.is_initialized():
            what = "no other ranks are known: torch.distributed is not initialised"
            fix = "pass comm=weft.init(...), or call torch.distributed.init_process_group first"
            raise LaunchError(Fault("comm", what, got="None", fix=fix))
        store = dist.distributed_c10d._get_default_store()
        return ProcessTransport(dist.get_rank(), dist.get_world_size(), store, device=device, timeout_s=timeout_s)

    def start(self, call: Call) -> Pending:
        """Hand `call` to the channel of its group; messages have a channel for each ordered pair."""
        if self._board.is_closed:
            raise CommError(f"{call.where}: this transport was closed")
        key = (call.is_p2p, call.ranks)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels.setdefault(key, self._channel(call))
        return channel.start(call)

    def close(self) -> None:
        """Drop all connections; what was started and never waited for is given up, other ranks see it fail.

        Without it this happens at the end of the program.
        """
        self._finalizer()

    def _channel(self, call: Call) -> Channel:
        name = ("pair " if call.is_p2p else "group ") + "-".join(map(str, call.ranks))
        size, index = len(call.ranks), call.index

        def open_line() -> Line:
            self._board.meet(name, call, self.timeout_s)
            return Line(lambda kind: self._connect(f"{name}/{kind}", kind, index, size), _REDUCE)

        return Channel(name, open_line, board=self._board, timeout_s=self.timeout_s)

    def _connect(self, name: str, kind: str, index: int, size: int) -> Backend:
        store, timeout = PrefixStore(name, self._store), timedelta(seconds=self.timeout_s)
        if kind == "cpu":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._timeout, options._threads = self._gloo_devices, timeout, 2
            return cast(Backend, gloo(_PatientStore(store, self._board, self.timeout_s), index, size, options))
        if kind == "cuda" and dist.is_nccl_available():
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            return cast(Backend, nccl(store, index, size, options))
        raise CommError(f"no backend carries tensors on {kind!r} between processes")


def _close(board: Board, channels: dict[tuple[bool, tuple[int, ...]], Channel], rank: int) -> None:
    board.is_closed = True
    for (_, ranks), channel in channels.items():
        channel.break_off(ranks.index(rank))
    for channel in channels.values():
        channel.join()
    channels.clear()


class _PatientStore(Store):
    """A store that looks again and again instead of blocking: a group that connects must not hold up another."""

    def __init__(self, store: Store, board: Board, timeout_s: float) -> None:
        super().__init__()
        self._store, self._board, self._timeout_s = store, board, timeout_s

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else self._timeout_s)
        for pause_s in pauses():
            if self._store.check(keys):
                return
            if time.monotonic() > deadline or self._board.is_closed:
                raise CommTimeout(f"a member of the group went away while it was being connected; missing {keys}")
            time.sleep(pause_s)


def _gloo_devices() -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")  # gloo's own variable: which network to use
    return [gloo.create_device(interface=name) for name in interfaces.split(",") if name] or [
        gloo.create_default_device()
    ]


def _store_of(rendezvous: str | Store, rank: int, size: int, timeout_s: float) -> Store:
    if isinstance(rendezvous, Store):
        return rendezvous
    try:
        found = next(find_rendezvous(rendezvous, rank, size, timeout=timedelta(seconds=timeout_s)))
    except (ValueError, RuntimeError) as error:
        told = str(error).splitlines()[0]
        raise LaunchError(
            Fault("rendezvous", f"rank {rank} of {size} cannot meet the others at {rendezvous}", got=told)
        ) from error
    return cast(Store, found[0])


def _own_corner(store: Store, rank: int) -> Store:
    """Keys of this transport alone: a restart by torchrun, or a second transport in this world, starts afresh."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    generation = store.add(f"weft/{attempt}/joined/{rank}", 1)
    return PrefixStore(f"weft/{attempt}/{generation}", store)
