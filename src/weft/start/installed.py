"""What other installed packages offer to weft by entry points: they are found by name, and never imported by weft itself."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from weft.errors import WeftError


def installed(group: str, name: str) -> Any:
    """What an installed package offers by an entry point; None where there is none.

    Raises:
        WeftError: the package cannot be imported.
    """
    for entry in importlib.metadata.entry_points(group=group, name=name):
        return load_installed(entry)
    return None


def load_installed(entry: importlib.metadata.EntryPoint) -> Any:
    """The object of an entry point.

    Raises:
        WeftError: it cannot be imported.
    """
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        text = f"the entry point {entry.name!r} ({entry.value}) cannot be imported: {error}"
        raise WeftError(text) from error
