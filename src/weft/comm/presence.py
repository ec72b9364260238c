"""How many calls each rank has started, in a shared store: for diagnosis, outside of any process group."""

from __future__ import annotations

import time
from typing import Protocol

from weft.comm.store_namespace import poll_intervals
from weft.comm.transport import Call
from weft.core.mesh import rank_list
from weft.errors import CommTimeout


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class PresenceStore:
    """One key per group and rank: the number of calls of that group that the rank has started.

    Members of a group start its calls in the same order, so a rank has joined call n (counted from
    0) once it has started more than n calls. No method blocks inside the store: several threads
    share its one connection.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_closed = False

    def announce(self, group: str, rank: int, num_started: int) -> None:
        """Let the other members of `group` see that `rank` has started this many of its calls."""
        key = _key(group, rank)
        self._store.set(key, str(num_started))

    def is_first(self, key: str) -> bool:
        """Whether this is the first rank to claim `key`."""
        return self._store.add(key, 1) == 1

    def missing(
        self,
        group: str,
        ranks: tuple[int, ...],
        *,
        num_started: int,
        within_s: float,
    ) -> tuple[int, ...]:
        """Those of `ranks` that have not started `num_started` calls of `group` after `within_s`,
        sooner if all have.

        None are missing if the store itself is lost.
        """
        deadline_s = time.monotonic() + within_s
        missing = ranks
        try:
            for interval_s in poll_intervals(len(ranks)):
                still_missing = []
                for rank in missing:
                    if self._num_started(group, rank) < num_started:
                        still_missing.append(rank)
                missing = tuple(still_missing)
                is_over = self.is_closed or time.monotonic() > deadline_s
                if not missing or is_over:
                    break
                time.sleep(interval_s)
        except RuntimeError:
            return ()
        return missing

    def wait_for_members(self, group: str, call: Call, *, timeout_s: float) -> None:
        """Announce the first call of this rank and return when every member of `call` has announced
        one.

        Each member counts itself and the last one sets a key: the requests of a rank do not grow
        with the group. Only after a time-out it asks for every member.

        Raises:
            CommTimeout: naming those that have not.
        """
        self.announce(group, call.rank, 1)
        num_members = len(call.ranks)
        complete_key = f"{group}/complete"
        if self._store.add(f"{group}/arrived", 1) == num_members:
            self._store.set(complete_key, "1")
        deadline_s = time.monotonic() + timeout_s
        for interval_s in poll_intervals(num_members):
            if self._store.check([complete_key]):
                return
            if self.is_closed or time.monotonic() > deadline_s:
                break
            time.sleep(interval_s)
        missing = self.missing(
            group,
            call.ranks,
            num_started=1,
            within_s=0.0,
        )
        if missing:
            late = f"{rank_list(missing)} did not arrive within {timeout_s:g} s"
            raise CommTimeout(f"{call.description}: {late}")

    def _num_started(self, group: str, rank: int) -> int:
        key = _key(group, rank)
        is_announced = self._store.check([key])
        if not is_announced:
            return 0
        number = self._store.get(key)
        return int(number)


def _key(group: str, rank: int) -> str:
    return f"{group}/{rank}"
