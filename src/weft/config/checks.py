"""Owns how a run is checked at the door: a table of checks, the keys that each reads, and mends that pass the same door."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config.run import Run
from weft.errors import Fault

Suggestion = Mapping[str, Any]
"""Dotted keys -> the values that would mend a fault: `{"mesh": "dp2 tp2"}`."""

MOST_SHOWN, MOST_TRIED = 2, 200
"""Mends that a fault names, and that are tried to find them."""


@dataclass(frozen=True)
class Check:
    """One question to a run. It is left out where one of the keys (or tables) that it reads is at fault already.

    Attributes:
        reads: the keys (or tables).
        find: what is wrong.
        mends: runs to try instead, nearest first, where something is wrong. A check that has some asks nothing but the
            run itself, so that it can be asked of many.
    """

    reads: tuple[str, ...]
    find: Callable[[Run], Iterable[Fault]]
    mends: Callable[[Run], Iterable[Suggestion]] | None = None


def run_checks(run: Run, checks: Iterable[Check], *, known: Collection[Fault] = ()) -> tuple[Fault, ...]:
    """`known` and what the checks find, each fault once; a slip in a key is told, its consequences are not.

    A fix names mends that were tried: with each of them this fault is gone, and where that can be no check finds a new one.
    """
    asked = [check for check in checks if not any(_touches(fault.key, key) for fault in known for key in check.reads)]
    found = dict.fromkeys(known)
    for check in asked:
        if faults := tuple(check.find(run)):
            fix = _fix(run, check, [each for each in asked if each.mends]) if check.mends else ""
            found |= dict.fromkeys(replace(fault, fix=fix) if fix else fault for fault in faults)
    return tuple(found)


def _fix(run: Run, check: Check, others: Sequence[Check]) -> str:
    """The nearest mends as flags: `--mesh "dp2 tp2" or --mesh dp4`; nothing where none was found."""
    bad = {other.find for other in others if _fails(other, run)}
    tried = itertools.islice(check.mends(run) if check.mends else (), MOST_TRIED)
    works = [mend for mend in tried if mend and not _fails(check, with_values(run, mend))]
    clean = (mend for mend in works if not any(_brings(other, run, mend) for other in others if other.find not in bad))
    shown = list(itertools.islice(dict.fromkeys(map(as_flags, clean)), MOST_SHOWN))
    return " or ".join(shown or list(map(as_flags, works[:MOST_SHOWN])))


def _brings(check: Check, run: Run, mend: Suggestion) -> bool:
    return _fails(check, with_values(run, mend))


def _fails(check: Check, run: Run) -> bool:
    return any(True for _ in check.find(run))


def with_values(run: Run, mend: Suggestion) -> Run:
    """The run with other values; they are right by themselves."""
    for key, value in mend.items():
        table, _, name = key.rpartition(".")
        changed = {table: getattr(run, table).model_copy(update={name: value})} if table else {name: value}
        run = run.model_copy(update=changed)
    return run


def as_flags(mend: Suggestion) -> str:
    """The words that set these values on the command line."""
    return " ".join(f"--{key} {_word(value)}" for key, value in mend.items())


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f'"{value}"' if " " in str(value) or value == "" else str(value)


def _touches(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def nothing(run: Run) -> Iterator[Suggestion]:
    """No mends to try: the fault names one itself."""
    yield from ()
