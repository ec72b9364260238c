"""Checks of a run config before anything starts: a check, the keys it reads, and suggestions that pass the same checks."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config.run import Run
from weft.core.model_config import ModelNotBuiltError
from weft.errors import Fault

Suggestion = Mapping[str, Any]
"""Dotted keys -> values that may remove a fault: `{"mesh": "dp2 tp2"}`."""

SPECIAL = frozenset('"$`\\!')
"""Characters that a shell reads between double quotes, too."""
MOST_SHOWN = 2
"""Suggestions that a fault names."""
MOST_TRIED = 12
"""Suggestions of one fault whose configs are checked as a whole."""


@dataclass(frozen=True)
class Check:
    """A rule, bound to the values of one run. It is skipped where one of the keys (or sections)
    that it reads is wrong already.

    Attributes:
        reads: the keys (or sections).
        find: what is wrong.
        suggest: values that remove the fault, computed from the rule, nearest first. Set for checks
            that depend on the config alone (no files, no devices), so that they can be repeated for
            other runs; None for the others.
    """

    reads: tuple[str, ...]
    find: Callable[[], Iterable[Fault]]
    suggest: Callable[[], Iterable[Suggestion]] | None = None

    def fails(self) -> bool:
        """Whether anything is wrong, as far as it is known before the model is built."""
        try:
            return any(True for _ in self.find())
        except ModelNotBuiltError:
            return False

    def reads_any(self, keys: Iterable[str]) -> bool:
        """Whether one of these keys is read, or lies in a section that is read, or the other way
        round.
        """
        return any(_overlap(key, read) for key in keys for read in self.reads)


CheckTable = Callable[[Run], Sequence[Check]]
"""Binds rules to the sections of a run: the same rules in the same order for every run."""

Adaptation = Callable[[Run], Run]
"""Adapts a run to its environment."""


def run_checks(run: Run, *tables: CheckTable, known: Collection[Fault] = ()) -> tuple[Fault, ...]:
    """`known` and the faults that the checks of the tables find, each once; checks that read a key
    of a known fault are skipped, and those that need a user's model built where others find faults.

    The fix of a fault names suggestions whose runs were checked: with each of them this fault is gone
    and, where possible, no check finds a new one.
    """
    unbuilt = run.model_copy(update={"model": run.model.unbuilt()})
    found, need_model = _faults(unbuilt, tables, known)
    if found or not need_model:
        return found
    found, _ = _faults(run, tables, known, only=need_model)
    return found


def _faults(
    run: Run,
    tables: Sequence[CheckTable],
    known: Collection[Fault],
    only: Collection[int] | None = None,
) -> tuple[tuple[Fault, ...], list[int]]:
    """The faults of all checks, or of those with these numbers, and the numbers of the checks that
    need the model built.
    """
    wrong_keys = [fault.key for fault in known]

    def checks_with(values: Suggestion) -> list[Check]:
        """The checks of the run with other values of some keys."""
        changed = run.with_values(values)
        every = itertools.chain.from_iterable(table(changed) for table in tables)
        return [check for check in every if not check.reads_any(wrong_keys)]

    found = list(known)
    need_model: list[int] = []
    for index, check in enumerate(checks_with({})):
        if only is not None and index not in only:
            continue
        try:
            faults = tuple(check.find())
        except ModelNotBuiltError:
            need_model.append(index)
            continue
        fix = _tested_fix(index, checks_with) if faults else ""
        found.extend(replace(fault, fix=fix) if fix else fault for fault in faults)
    return tuple(dict.fromkeys(found)), need_model


def _tested_fix(index: int, checks_with: Callable[[Suggestion], list[Check]]) -> str:
    """The nearest suggestions of a check as flags, `--mesh "dp2 tp2" or --mesh dp4`; empty where
    none removes its fault.

    Args:
        index: of the check.
        checks_with: returns all checks, bound to the run with the values of a suggestion.
    """
    checks = checks_with({})
    suggest = checks[index].suggest
    if suggest is None:
        return ""
    passing_now = [
        number
        for number, other in enumerate(checks)
        if other.suggest is not None and not other.fails()
    ]
    working: list[str] = []
    clean: list[str] = []
    for suggestion in itertools.islice(suggest(), MOST_TRIED):
        if not suggestion:
            continue
        changed = checks_with(suggestion)
        if changed[index].fails():
            continue
        flags = as_flags(suggestion)
        if flags not in working:
            working.append(flags)
        if flags not in clean and not any(changed[number].fails() for number in passing_now):
            clean.append(flags)
        if len(clean) == MOST_SHOWN:
            break
    return " or ".join(clean or working[:MOST_SHOWN])


def as_flags(suggestion: Suggestion) -> str:
    """The command line that sets these values."""
    flags = [f"--{key} {_word(value)}" for key, value in suggestion.items()]
    return " ".join(flags)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_word, value))
    text = str(value)
    quoted = shlex.quote(text)
    if quoted == text or set(text) & SPECIAL:
        return quoted
    return f'"{text}"'


def _overlap(key: str, other: str) -> bool:
    """Whether two keys are equal, or one is a section that holds the other."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
