"""Choices that rank 0 makes for all ranks of torchrun or Slurm: computed once, its error on every rank, time-outs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.comm.test_store_namespace import MemoryStore
from weft.errors import Fault, LaunchError, PlanError, UserError, WeftError
from weft.run.world import World
from weft.start.shared_choice import CHOICE_PORTS, choose_once, shared_store

NUM_RANKS = 3
FAULT = Fault("mesh", "auto finds no layout", got="3 ranks", need="4", fix="--nproc 4")


def world_of(rank: int) -> World:
    return World(rank, NUM_RANKS, rank, NUM_RANKS, "env://", job="torchrun 7")


def on_all_ranks(
    choose: Callable[[int], dict[str, Any]], store: MemoryStore, ranks: range = range(NUM_RANKS)
) -> list[object]:
    """What every rank returns or raises."""

    def run(rank: int) -> object:
        try:
            return choose_once(
                lambda: choose(rank), store, world_of(rank), arrival_s=0.2, choice_s=0.2
            )
        except (WeftError, ZeroDivisionError) as error:
            return error

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(run, ranks))


def test_rank_0_alone_chooses_and_a_later_choice_is_not_the_earlier_one() -> None:
    store = MemoryStore()
    called: list[int] = []

    def choose(rank: int) -> dict[str, Any]:
        called.append(rank)
        return {"mesh": f"dp{len(called)}"}

    assert on_all_ranks(choose, store) == [{"mesh": "dp1"}] * NUM_RANKS
    assert on_all_ranks(choose, store) == [{"mesh": "dp2"}] * NUM_RANKS
    assert called == [0, 0]


def test_the_error_of_rank_0_is_that_of_every_rank() -> None:
    def choose(rank: int) -> dict[str, Any]:
        raise PlanError(FAULT)

    for error in on_all_ranks(choose, MemoryStore()):
        assert isinstance(error, PlanError)
        assert error.faults == (FAULT,)

    def fail(rank: int) -> dict[str, Any]:
        raise ZeroDivisionError("division by zero")

    own, *others = on_all_ranks(fail, MemoryStore())
    assert isinstance(own, ZeroDivisionError)
    for error in others:
        assert isinstance(error, LaunchError)
        assert "rank 0, which chooses for all ranks, has failed" in str(error)
        assert "ZeroDivisionError: division by zero" in str(error)


def test_ranks_without_rank_0_or_its_choice_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (error,) = on_all_ranks(lambda rank: {}, MemoryStore(), range(1, 2))
    assert isinstance(error, LaunchError)
    assert "rank 0 did not arrive within 0.2 s" in str(error)

    store = MemoryStore()
    monkeypatch.setattr(MemoryStore, "set", set_all_but_the_choice)
    _, *others = on_all_ranks(lambda rank: {}, store)
    for error in others:
        assert isinstance(error, UserError)
        assert (
            str(error) == "mesh: rank 0 has not chosen within 0.2 s. Fix: name a mesh: --mesh dp2"
        )


def set_all_but_the_choice(store: MemoryStore, key: str, value: str) -> None:
    if not key.endswith("chosen"):
        store.values[key] = value


def test_variables_of_torchrun_set_by_hand_have_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert shared_store(world_of(1)) is None
    alone = World(0, 1, 0, 1, "tcp://host:1")
    assert shared_store(alone) is None


def test_ranks_of_slurm_read_the_choice_from_a_store_of_rank_0() -> None:
    """Its port is not that of the run, whose store is opened later."""
    port = free_port()
    called: list[int] = []

    def run(rank: int) -> dict[str, Any]:
        world = World(rank, NUM_RANKS, rank, NUM_RANKS, f"tcp://127.0.0.1:{port}", job="slurm 7.0")
        store = shared_store(world)
        assert store is not None

        def choose() -> dict[str, Any]:
            called.append(rank)
            return {"mesh": "dp3"}

        return choose_once(choose, store, world, arrival_s=20, choice_s=20)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        assert list(pool.map(run, range(NUM_RANKS))) == [{"mesh": "dp3"}] * NUM_RANKS
    assert called == [0]


def free_port() -> int:
    """A port whose port for choices is free now."""
    for port in CHOICE_PORTS:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
