"""Owns what processes tell each other through a store, outside of any group: who has come, who waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from weft.comm.transport import Call
from weft.errors import CommTimeout

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.02


def pauses() -> Iterator[float]:
    """Seconds between two looks: short ones first, for those who come together."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.3 * pause_s, LONGEST_PAUSE_S)


class Store(Protocol):
    """The part of a torch Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Board:
    """Notes that all ranks can read. Nobody blocks inside the store: its one connection serves several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_closed = False

    def post(self, note: str) -> None:
        """Leave `note`."""
        self._store.set(note, "1")

    def posted(self, notes: Sequence[str], within_s: float) -> list[bool]:
        """Which of `notes` are there once all of them are, or after `within_s`. All, if the store itself is gone."""
        deadline = time.monotonic() + within_s
        there = [False] * len(notes)
        try:
            for pause_s in pauses():
                there = [known or self._store.check([note]) for known, note in zip(there, notes, strict=True)]
                if all(there) or time.monotonic() > deadline or self.is_closed:
                    break
                time.sleep(pause_s)
        except RuntimeError:
            return [True] * len(notes)
        return there

    def meet(self, name: str, call: Call, timeout_s: float) -> None:
        """Return when every member of `call` has come to connect the group `name`.

        Raises:
            CommTimeout: naming those who have not.
        """
        notes = [f"{name}/opens/{rank}" for rank in call.ranks]
        self.post(notes[call.index])
        there = self.posted(notes, within_s=timeout_s)
        missing = [str(rank) for rank, is_there in zip(call.ranks, there, strict=True) if not is_there]
        if missing:
            late = f"rank{'s' * (len(missing) > 1)} {' '.join(missing)} did not come"
            raise CommTimeout(f"{call.where}: {late} within {timeout_s:g} s")
