"""Owns the threads transport: one rank a thread of this process. Deterministic, quick to start, and hangs are named."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.comm.rooms import House, Meeting
from weft.comm.transport import Call
from weft.errors import CommError

# Note [Backward passes in rank threads]
# For tensors on the CPU the autograd engine runs a backward pass in the thread that called it, so a collective inside
# `backward` blocks just its own rank, like one in `forward`. For tensors on an accelerator the engine has one thread
# for each device, shared by all ranks of the process: ranks on different devices are fine, but two ranks on the same
# accelerator would wait for each other inside that one thread. So: at most one rank on each accelerator.
# Gradient mode, inference mode, autocast and flush-denormal belong to a thread; the default random generator, default
# dtype and number of intra-op threads belong to the process, and all ranks share them.


class ThreadWorld:
    """A world of `size` ranks that meet in this process's memory.

    >>> world = ThreadWorld(2)
    >>> comm = Comm(Mesh.parse("dp2"), 0, world.transport(0))     # in rank 0's thread

    Args:
        devices: one for each rank; CPU for all of them by default. Pieces are moved to the device that takes them.
        timeout_s: how long a rank waits for the others of its group.
    """

    def __init__(self, size: int, *, devices: Sequence[torch.device | str] = (), timeout_s: float = 60.0) -> None:
        if devices and len(devices) != size:
            raise CommError(f"{size} ranks need {size} devices, got {len(devices)}")
        self.size = size
        self._devices = tuple(map(torch.device, devices)) or (torch.device("cpu"),) * size
        self._house = House(size, timeout_s)

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of `rank`, for the thread that plays it."""
        if not 0 <= rank < self.size:
            raise CommError(f"rank {rank} is outside a world of {self.size}")
        return ThreadTransport(rank, self.size, self._devices[rank], self._house)

    def fail(self, rank: int, error: BaseException) -> None:
        """Rank `rank` has failed: release all who wait, with an error that names it. Only the first failure counts."""
        self._house.condemn(CommError, f"rank {rank} failed first: {type(error).__name__}: {error}")

    def leave(self, rank: int) -> None:
        """Rank `rank` has finished: whoever still waits for it is told at once."""
        self._house.leave(rank)


class ThreadTransport:
    """One rank's side of a `ThreadWorld`."""

    def __init__(self, rank: int, size: int, device: torch.device, house: House) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._house = house
        self._home = 0

    def start(self, call: Call) -> ThreadPending:
        """Join the meeting whose turn it is; the last one to come plays it at once."""
        self._home = self._home or threading.get_ident()
        return ThreadPending(self._house, self._house.room(call).enter(call), call, self._home)


@dataclass(slots=True)
class ThreadPending:
    """A meeting that this rank has joined."""

    house: House
    meeting: Meeting
    call: Call
    home: int

    def wait(self) -> None:
        """Block until all have come.

        Raises:
            MismatchError: they brought different things.
            CommTimeout: some did not come in time, have finished, or wait for this rank.
            CommError: another rank has failed.
        """
        self.house.wait(self.meeting, self.call, is_only_thread=threading.get_ident() == self.home)

    def is_completed(self) -> bool:
        """Whether all have come."""
        return self.meeting.done
