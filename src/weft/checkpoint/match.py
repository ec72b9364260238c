"""Owns the question whether a checkpoint is of this model: its family and every field that makes its shapes. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.format import Facts
from weft.errors import CheckpointError, Fault


def check_model(path: Path, facts: Facts, *, family: str, architecture: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model; needs no tensor, so the door can ask before a rank starts.

    Raises:
        CheckpointError: naming every field that differs.
    """
    if family != facts.family:
        raise CheckpointError(_other(path, "family", facts.family, family))
    ours = {name: _plain(value) for name, value in architecture.items()}
    names = [name for name in (*facts.architecture, *ours) if facts.architecture.get(name) != ours.get(name)]
    faults = (_other(path, name, facts.architecture.get(name), ours.get(name)) for name in dict.fromkeys(names))
    if found := tuple(faults):
        raise CheckpointError(*found)


_MEND = "give the model as in the run.toml of its run"


def _other(path: Path, key: str, got: Any, need: Any) -> Fault:
    return Fault(str(path), f"a checkpoint of another model: {key} differs", f"{got!r}", f"{need!r}", _MEND)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
