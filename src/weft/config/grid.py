"""A grid of runs: flags with several values, all combinations of these, and a name for each combination. No torch."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from weft.config import flags
from weft.config.command_options import takes_several
from weft.config.keys import table_key
from weft.errors import Fault, UserError

MAX_RUNS = 1000
MAX_NAME = 120
"""Characters of a name: that of a folder has at most 255 bytes."""
MAX_VALUE = 40
NOT_IN_NAMES = re.compile(r"[^\w.+-]+", re.ASCII)
EXAMPLE = "weft sweep --optim.lr 1e-4 3e-4 --steps 20"

Value = tuple[str, ...]
"""The words of one value."""


@dataclass(frozen=True)
class GridPoint:
    """One run of a grid.

    Attributes:
        name: says its values: `lr=1e-4,global_size=8`.
        values: of the keys with several values, as they are written.
        words: of the command line of this run.
    """

    name: str
    values: Mapping[str, str]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """All combinations of the values of some keys.

    Attributes:
        keys: that have several values -> a short name of each, that no other one has.
    """

    keys: Mapping[str, str]
    points: tuple[GridPoint, ...]


def grid_of(words: Sequence[str], known: Mapping[str, FieldInfo]) -> Grid:
    """The runs that flags with several values describe; the last key changes fastest.

    A key of one value has a value for each word; one of several words (`mesh`, `optim.betas`) has a
    value for each time that it is given.

    Args:
        known: keys of a run.

    Raises:
        UserError: no key has several values, one has a value twice, or the runs are too many.
    """
    split = flags.split(words)
    alternatives: dict[str, list[Value]] = {}
    for key, given in split.flags:
        alternatives.setdefault(key, []).extend(_values(key, given, known))
    several = {key: values for key, values in alternatives.items() if len(values) > 1}
    faults = list(_faults(several))
    if faults:
        raise UserError(*faults)
    short = _short_names(list(several))
    fixed = [*split.loose]
    for key, (value, *_) in alternatives.items():
        if key not in several:
            fixed.extend(_flag(key, value))
    combinations = itertools.product(*several.values())
    chosen = [dict(zip(several, values, strict=True)) for values in combinations]
    points = []
    for name, values in zip(_names(chosen, short), chosen, strict=True):
        own = [word for key, value in values.items() for word in _flag(key, value)]
        texts = {key: " ".join(value) for key, value in values.items()}
        points.append(GridPoint(name, texts, (*fixed, *own)))
    return Grid(short, tuple(points))


def _values(key: str, given: Value, known: Mapping[str, FieldInfo]) -> list[Value]:
    """The values that the words after one flag are."""
    field = known.get(key)
    is_one = key in flags.OPEN or bool(table_key(key, known))
    if len(given) < 2 or is_one or (field is not None and takes_several(key, field)):
        return [given]
    return [(word,) for word in given]


def _faults(several: Mapping[str, Sequence[Value]]) -> Iterator[Fault]:
    if not several:
        need = "two values of some key"
        yield Fault(
            "weft sweep", "no key has several values", need=need, fix=f"for example {EXAMPLE}"
        )
    for key, values in several.items():
        (value, times), *_ = Counter(values).most_common(1)
        if times > 1:
            yield Fault(key, "has a value twice", got=" ".join(value), fix="name each value once")
    number = math.prod(len(values) for values in several.values())
    if number > MAX_RUNS:
        got, need = f"{number:,} runs", f"at most {MAX_RUNS:,}"
        yield Fault("weft sweep", "has too many runs", got=got, need=need, fix="name fewer values")


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each key without its section; with it where two are the same without."""
    last = {key: key.rpartition(".")[2] for key in keys}
    times = Counter(last.values())
    return {key: name if times[name] == 1 else key for key, name in last.items()}


def _flag(key: str, value: Value) -> list[str]:
    is_short_flag = key.startswith("-")
    return [key if is_short_flag else f"--{key}", *value]


def _names(chosen: Sequence[Mapping[str, Value]], short: Mapping[str, str]) -> Iterator[str]:
    """A name of a folder for each combination, all different."""
    seen: set[str] = set()
    for values in chosen:
        name = ",".join(f"{short[key]}={_text(value)}" for key, value in values.items())
        if len(name) > MAX_NAME:
            name = f"{name[:MAX_NAME]}-{_digest(name)}"
        numbers = itertools.count(2)
        distinct = name
        while distinct in seen:
            distinct = f"{name}-{next(numbers)}"
        seen.add(distinct)
        yield distinct


def _text(value: Value) -> str:
    """A value as a part of a name: `dp2-tp2`, of a long path the end."""
    return NOT_IN_NAMES.sub("-", " ".join(value)).strip("-")[-MAX_VALUE:] or "none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
