"""Clocks of several hosts: ranks with other clocks find the offset, and ranks of one host have none."""

from __future__ import annotations

import threading
import time

import pytest

from weft.comm.comm import Comm
from weft.profiler import clocks
from weft.profiler.clocks import Offset, clock_offset
from weft.testing import run_ranks

AHEAD_S = 1000.0


class ClockOfRank:
    """A clock that is ahead by so much for each rank, which is a thread."""

    def __init__(self) -> None:
        self.local = threading.local()

    def monotonic(self) -> float:
        return time.monotonic() + AHEAD_S * float(self.local.rank)


def test_ranks_of_several_hosts_find_the_offset_of_their_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ClockOfRank()
    monkeypatch.setattr(clocks, "time", clock)
    monkeypatch.setattr(clocks, "_boot_id", lambda: f"boot {clock.local.rank}")

    def offset_of(comm: Comm) -> Offset:
        clock.local.rank = comm.rank
        return clock_offset(comm)

    for rank, found in enumerate(run_ranks("dp3", offset_of)):
        assert abs(found.seconds - AHEAD_S * rank) <= found.error_s + 1e-6
        assert found.error_s < 0.5


def test_ranks_of_one_host_have_one_clock() -> None:
    assert run_ranks("dp2", clock_offset) == [Offset(), Offset()]
