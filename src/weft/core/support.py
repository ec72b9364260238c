"""Owns what the config already names and weft does not do yet: delete a row when the feature lands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.core.checks import Check
from weft.core.config import Run
from weft.errors import Fault

WORKS: dict[str, tuple[Any, ...]] = {}
"""Key -> the values that work; keys that are not named here work with all their values."""


def unsupported(run: Run) -> Iterable[Fault]:
    """Keys that stand at values which do not work yet."""
    for key, working in WORKS.items():
        value = value_at(run, key)
        if value not in working:
            need = " or ".join("nothing" if choice is None else str(choice) for choice in working)
            yield Fault(key, "is not there yet with this value", got=repr(value), need=need, fix=f"leave {key} out")


def value_at(run: Run, key: str) -> Any:
    """The value that stands at a dotted key."""
    value: Any = run
    for name in key.split("."):
        value = getattr(value, name)
    return value


CHECKS = (Check((), unsupported),)
