"""Agreement of ranks on a namespace: other jobs, earlier attempts and strays neither join nor stall it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from weft.comm import world_store
from weft.comm.world_store import agree_on_namespace
from weft.errors import LaunchError

STRAY_S = 0.3


class MemoryStore:
    """A store in a dict, which counts requests."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_requests = 0
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.num_requests += 1
            self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.num_requests += amount != 0
            before = int(self.values.get(key, "0"))
            self.values[key] = str(before + amount)
            return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lock:
            self.num_requests += 1
            if self.values.get(key, "") == expected:
                self.values[key] = desired
            return self.values[key].encode()


class Joining(threading.Thread):
    """One rank that joins; its namespace, or the error."""

    def __init__(self, store: MemoryStore, rank: int, size: int, **keys: object) -> None:
        super().__init__(daemon=True)
        self.prefix = ""
        self.error: LaunchError | None = None
        self._join: Callable[[], str] = lambda: agree_on_namespace(
            store, rank, size, **{"job": "slurm 7.0", "timeout_s": 20.0, **keys}
        )
        self.start()

    def run(self) -> None:
        try:
            self.prefix = self._join()
        except LaunchError as error:
            self.error = error


def ended(*threads: Joining) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def joined(store: MemoryStore, size: int, **keys: object) -> str:
    """The namespace of a world whose ranks start in reverse order."""
    threads = []
    for rank in reversed(range(size)):
        threads.append(Joining(store, rank, size, **keys))
    ended(*threads)
    assert [thread.error for thread in threads] == [None] * size
    (prefix,) = {thread.prefix for thread in threads}
    return prefix


def test_all_ranks_get_one_namespace_with_a_constant_number_of_requests_each():
    store = MemoryStore()
    prefix = joined(store, 8)
    assert prefix.startswith("weft/slurm 7.0/")
    assert store.num_requests == 2 + 2 * 7


def test_every_attempt_in_a_store_gets_another_namespace():
    store = MemoryStore()
    count = len({joined(store, 3) for _ in range(3)})
    assert count == 3


def test_a_wait_for_ranks_is_noted_while_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(world_store, "NOTE_AFTER_S", 0.05)
    store = MemoryStore()
    leader = Joining(store, 0, 3)
    ended_at_s = time.monotonic() + 20
    shown = ""
    while "note" not in shown and time.monotonic() < ended_at_s:
        time.sleep(0.02)
        shown += capsys.readouterr().err
    assert shown == "note: rank 0 waits for ranks 1 2 to join\n"
    ended(leader, Joining(store, 1, 3), Joining(store, 2, 3))


def test_a_job_with_another_name_in_the_store_changes_nothing():
    store = MemoryStore()
    stray = Joining(store, 1, 2, job="slurm 8.0", timeout_s=STRAY_S)
    prefix = joined(store, 2)
    ended(stray)
    assert "rank 0 did not arrive within 0.3 s" in str(stray.error)
    assert prefix.startswith("weft/slurm 7.0/")


def test_a_stray_of_the_same_name_is_rejected_in_one_line(monkeypatch):
    monkeypatch.setattr(world_store, "REPLACED_WAIT_S", STRAY_S)
    store = MemoryStore()
    prefix = joined(store, 2)
    monkeypatch.setattr("os.getpid", lambda: 1)
    stray = Joining(store, 1, 2)
    ended(stray)
    assert str(stray.error).startswith(
        "rendezvous: another process is rank 1 of this job (got process "
    )
    assert store.values[f"{prefix}/joined"] == "1"


def test_ranks_leave_a_leader_that_has_died_for_the_next_one():
    store = MemoryStore()
    store.set("weft/slurm 7.0/leader", "weft/slurm 7.0/dead")
    early = Joining(store, 1, 3)
    while "weft/slurm 7.0/dead/slot/1" not in store.values:
        time.sleep(0.001)
    others = [Joining(store, rank, 3) for rank in (0, 2)]
    ended(early, *others)
    assert early.prefix == others[0].prefix == others[1].prefix != "weft/slurm 7.0/dead"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_time_out_names_who_is_missing(rank):
    store = MemoryStore()
    threads = [Joining(store, rank, 4, timeout_s=STRAY_S)]
    ended(*threads)
    missing = "ranks 1 2 3" if rank == 0 else "rank 0"
    assert f"{missing} did not arrive within 0.3 s" in str(threads[0].error)


def test_a_second_world_of_the_same_processes_waits_for_its_leader():
    store = MemoryStore()
    first = joined(store, 2)
    early = Joining(store, 1, 2)
    time.sleep(0.05)
    late = Joining(store, 0, 2)
    ended(early, late)
    assert early.prefix == late.prefix != first
