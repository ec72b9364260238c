"""Checks of a run config before anything starts: a check, the keys it reads, and suggestions that pass the same checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config.run import Run
from weft.errors import Fault

Suggestion = Mapping[str, Any]
"""Dotted keys -> values that may remove a fault: `{"mesh": "dp2 tp2"}`."""

MOST_SHOWN = 2
"""Suggestions that a fault names."""
MOST_TRIED = 200
"""Suggestions that are tried for one fault."""


@dataclass(frozen=True)
class Check:
    """One question to a run. It is skipped where one of the keys (or sections) that it reads is
    wrong already.

    Attributes:
        reads: the keys (or sections).
        find: what is wrong.
        suggest: values to try instead, nearest first. Set for checks that depend on the run alone
            (no files, no devices), so that they can be repeated for many runs; None for the others.
    """

    reads: tuple[str, ...]
    find: Callable[[Run], Iterable[Fault]]
    suggest: Callable[[Run], Iterable[Suggestion]] | None = None

    def fails(self, run: Run) -> bool:
        """Whether anything is wrong."""
        return any(True for _ in self.find(run))

    def reads_any(self, keys: Iterable[str]) -> bool:
        """Whether one of these keys is read, or lies in a section that is read, or the other way
        round.
        """
        return any(_overlap(key, read) for key in keys for read in self.reads)


def run_checks(
    run: Run,
    checks: Iterable[Check],
    *,
    known: Collection[Fault] = (),
) -> tuple[Fault, ...]:
    """`known` and the faults that the checks find, each once; checks that read a key of a known
    fault are skipped.

    The fix of a fault names suggestions that were tried: with each of them this fault is gone and,
    where possible, no check finds a new one.
    """
    wrong_keys = [fault.key for fault in known]
    active = [check for check in checks if not check.reads_any(wrong_keys)]
    repeatable = [check for check in active if check.suggest is not None]
    found = list(known)
    for check in active:
        faults = tuple(check.find(run))
        fix = _tested_fix(run, check, repeatable) if faults else ""
        for fault in faults:
            found.append(replace(fault, fix=fix) if fix else fault)
    return tuple(dict.fromkeys(found))


def _tested_fix(
    run: Run,
    check: Check,
    others: Sequence[Check],
) -> str:
    """The nearest suggestions as flags, `--mesh "dp2 tp2" or --mesh dp4`; empty where none removes
    the fault.
    """
    if check.suggest is None:
        return ""
    passing_now = [other for other in others if not other.fails(run)]
    working: list[str] = []
    clean: list[str] = []
    for suggestion in itertools.islice(check.suggest(run), MOST_TRIED):
        if not suggestion:
            continue
        changed = with_values(run, suggestion)
        if check.fails(changed):
            continue
        flags = as_flags(suggestion)
        if flags not in working:
            working.append(flags)
        if flags not in clean and not any(other.fails(changed) for other in passing_now):
            clean.append(flags)
        if len(clean) == MOST_SHOWN:
            break
    return " or ".join(clean or working[:MOST_SHOWN])


def with_values(run: Run, suggestion: Suggestion) -> Run:
    """The run with these values, which must be valid by themselves."""
    for key, value in suggestion.items():
        section, _, name = key.rpartition(".")
        update = {name: value}
        if section:
            update = {section: getattr(run, section).model_copy(update=update)}
        run = run.model_copy(update=update)
    return run


def as_flags(suggestion: Suggestion) -> str:
    """The command line that sets these values."""
    return " ".join(f"--{key} {_word(value)}" for key, value in suggestion.items())


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    text = str(value)
    needs_quotes = text == "" or " " in text
    return f'"{text}"' if needs_quotes else text


def _overlap(key: str, other: str) -> bool:
    """Whether two keys are equal, or one is a section that holds the other."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
