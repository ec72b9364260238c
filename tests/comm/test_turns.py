"""Rank threads that take turns on one core: one computes at a time, and none waits for a turn that never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from weft.comm import threads
from weft.comm.comm import Comm
from weft.run import run_ranks as run_ranks_module
from weft.run.run_ranks import run_ranks


class Computing:
    """Counts the ranks inside its block at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.001)  # other threads may run
        yield
        with self._lock:
            self.now -= 1


def test_one_rank_computes_at_a_time_between_collectives() -> None:
    computing = Computing()

    def rank(comm: Comm) -> float:
        total = torch.ones(1)
        for _ in range(3):
            with computing.one_more():
                total = total + comm.rank
            total = comm.all_reduce(total, "dp")
        return float(total)

    expected = run_ranks("dp4", rank)
    computing.most = 0
    assert run_ranks("dp4", rank, takes_turns=True) == expected
    assert computing.most == 1


def test_a_rank_that_polls_lets_the_others_compute() -> None:
    def rank(comm: Comm) -> int:
        work = comm.start_all_reduce(torch.ones(1), "dp")
        polls = 0
        while not work.is_completed():
            polls += 1
            time.sleep(0.001)
        return int(work.wait())

    start_s = time.monotonic()
    assert run_ranks("dp2", rank, takes_turns=True) == [2, 2]
    assert time.monotonic() - start_s < threads.PATIENCE_S / 2


def test_a_rank_goes_on_without_a_turn_when_its_holder_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "PATIENCE_S", 0.05)
    has_run = threading.Event()

    def rank(comm: Comm) -> bool:
        if comm.rank == 1:
            has_run.set()
        return has_run.wait(10.0)

    assert run_ranks("dp2", rank, takes_turns=True) == [True, True]


def test_an_error_of_one_rank_ends_the_others() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("no number")
        comm.all_reduce(torch.ones(1), "dp")

    with pytest.raises(ValueError, match="no number"):
        run_ranks("dp3", rank, takes_turns=True)


def test_a_rank_that_waits_for_its_turn_is_not_reported_as_late(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_ranks_module, "LATE_AFTER_S", 0.05)

    def rank(comm: Comm) -> float:
        if comm.rank == 0:
            time.sleep(0.2)
        return float(comm.all_reduce(torch.ones(1), "dp"))

    run_ranks("dp2", rank)
    assert "has waited" in capfd.readouterr().err
    run_ranks("dp2", rank, takes_turns=True)
    assert "has waited" not in capfd.readouterr().err
