"""Presence of ranks in a shared store: which members have joined a call; for diagnosis, outside of any process group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from weft.comm.signature import rank_list
from weft.comm.transport import Call
from weft.errors import CommTimeout

FIRST_POLL_S, LONGEST_POLL_S = 0.0005, 0.02
POLL_GROWTH = 1.3


def poll_intervals() -> Iterator[float]:
    """Seconds between two looks at the store: short at first, for ranks that arrive together."""
    interval_s = FIRST_POLL_S
    while True:
        yield interval_s
        interval_s = min(POLL_GROWTH * interval_s, LONGEST_POLL_S)


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class PresenceStore:
    """Keys by which ranks announce that they have joined a call.

    No method blocks inside the store: several threads of the process share its one connection.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_closed = False

    def announce(self, key: str) -> None:
        """Set `key`."""
        self._store.set(key, "1")

    def is_first(self, key: str) -> bool:
        """Whether this is the first rank to claim `key`."""
        return self._store.add(key, 1) == 1

    def missing_keys(self, keys: Sequence[str], *, within_s: float) -> tuple[str, ...]:
        """Those of `keys` that are not set after `within_s`, sooner if all are; none if the store itself is lost."""
        deadline_s = time.monotonic() + within_s
        missing = list(keys)
        try:
            for interval_s in poll_intervals():
                missing = [key for key in missing if not self._store.check([key])]
                is_over = self.is_closed or time.monotonic() > deadline_s
                if not missing or is_over:
                    break
                time.sleep(interval_s)
        except RuntimeError:
            return ()
        return tuple(missing)

    def missing(self, call: Call, prefix: str, *, within_s: float) -> tuple[int, ...]:
        """Members of `call` that have not announced `presence_key(prefix, rank)` within `within_s`."""
        rank_of_key = {}
        for rank in call.ranks:
            rank_of_key[presence_key(prefix, rank)] = rank
        missing_keys = self.missing_keys(tuple(rank_of_key), within_s=within_s)
        return tuple(rank_of_key[key] for key in missing_keys)

    def wait_for_members(self, prefix: str, call: Call, *, timeout_s: float) -> None:
        """Announce this rank and return when every member of `call` has announced itself under `prefix`.

        Raises:
            CommTimeout: naming those that have not.
        """
        self.announce(presence_key(prefix, call.rank))
        missing = self.missing(call, prefix, within_s=timeout_s)
        if missing:
            late = f"{rank_list(missing)} did not arrive within {timeout_s:g} s"
            raise CommTimeout(f"{call.description}: {late}")


def presence_key(prefix: str, rank: int) -> str:
    """Key that `rank` sets when it has joined what `prefix` names."""
    return f"{prefix}/{rank}"
