"""Owns the rule that no folder is written over. Pure: no torch."""

from __future__ import annotations

from pathlib import Path

from weft.errors import CheckpointError, Fault


def refuse_filled(folder: Path) -> None:
    """Nothing is overwritten.

    Raises:
        CheckpointError: there is something.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        fix = "choose another folder, or move it away"
        raise CheckpointError(Fault(str(folder), "is there already", need="an empty folder, or none", fix=fix))
