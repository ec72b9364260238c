"""Owns how a run is checked at the door: a table of checks, each of which names the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from weft.core.config import Run
from weft.errors import Fault


@dataclass(frozen=True)
class Check:
    """One question to a run. It is left out where one of the keys (or tables) that it reads is at fault already."""

    reads: tuple[str, ...]
    find: Callable[[Run], Iterable[Fault]]


def ask(run: Run, checks: Iterable[Check], *, known: Collection[Fault] = ()) -> tuple[Fault, ...]:
    """`known` and what the checks find, each fault once; a slip in a key is told, its consequences are not."""
    found = dict.fromkeys(known)
    for check in checks:
        if not any(_touches(fault.key, key) for fault in known for key in check.reads):
            found |= dict.fromkeys(check.find(run))
    return tuple(found)


def _touches(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
