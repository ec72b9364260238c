"""Clocks of a profile: the host's or the device's, and what the clock of a host is ahead of that of rank 0.

Note [One clock]
    The monotonic clock of a host is one clock for all its processes. Between hosts all ranks gather
    the times at which each of them enters the same collective, several times. No rank leaves such a
    collective before the last rank has entered it. So if rank r is o ahead of rank 0, then

        it left after rank 0 entered       left_r - o >= entered_0       o <= left_r - entered_0
        rank 0 left after it entered       left_0 >= entered_r - o       o >= entered_r - left_0

    and the narrowest of these bounds over all rounds hold the offset, whatever the network does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from weft.comm.comm import Comm
from weft.comm.text import all_gather_text

NUM_ROUNDS = 20
BOOT_FILE = "/proc/sys/kernel/random/boot_id"

Mark = Any
"""A time of a clock that is not read yet: seconds, or an event on a device."""


class ProfileClock(Protocol):
    """Marks points in time; `seconds` reads a mark once the work before it has ended."""

    def now(self) -> Mark: ...
    def seconds(self, mark: Mark) -> float: ...


class HostClock:
    """The monotonic clock of the host."""

    now = staticmethod(time.monotonic)

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark


class CudaClock:
    """Events on the current stream: the times at which the device comes to them.

    A mark costs the host a launch, and waits for nothing. The device's time is tied to the host's
    once, when the clock is made and the device has nothing else to do.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_s = time.monotonic()

    def now(self) -> torch.cuda.Event:
        """An event behind everything that was launched on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """When the device came to the event, in seconds of the host's clock; waits for it."""
        mark.synchronize()
        return self._origin_s + 1e-3 * float(self._origin.elapsed_time(mark))


def clock_of(device: torch.device) -> ProfileClock:
    """The clock by which work on a device is timed."""
    return CudaClock() if device.type == "cuda" else HostClock()


class Round(NamedTuple):
    """When a rank entered and left a collective of all ranks, by its own clock."""

    entered: float
    left: float


@dataclass(frozen=True)
class Offset:
    """Seconds that a clock is ahead of another one, and the error that this may have."""

    seconds: float = 0.0
    error_s: float = 0.0


def offset_between(first: Sequence[Round], other: Sequence[Round]) -> Offset:
    """What the clock of the other is ahead, from the same collectives on both; see Note [One clock]."""
    pairs = list(zip(first, other, strict=True))
    most = min(theirs.left - own.entered for own, theirs in pairs)
    least = max(theirs.entered - own.left for own, theirs in pairs)
    return Offset((least + most) / 2, max(0.0, (most - least) / 2))


def clock_offset(comm: Comm) -> Offset:
    """What the clock of this rank's host is ahead of that of rank 0; every rank must call it."""
    boots = all_gather_text(comm, _boot_id())
    if boots[0] and len(set(boots)) == 1:
        return Offset()
    rounds: list[Round] = []
    for _ in range(NUM_ROUNDS):
        entered = time.monotonic()
        comm.barrier_world()
        rounds.append(Round(entered, time.monotonic()))
    own = torch.tensor(rounds, dtype=torch.float64, device=comm.device).unsqueeze(0)
    everyone = [[Round(*each) for each in rank] for rank in comm.all_gather_world(own).tolist()]
    if boots[comm.rank] == boots[0]:
        return Offset()
    return offset_between(everyone[0], everyone[comm.rank])


def _boot_id() -> str:
    """What tells hosts apart; empty where it cannot be read."""
    try:
        with open(BOOT_FILE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
