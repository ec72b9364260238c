"""Names of all mutants, read from the source of the modules that list them. No torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PATTERN = "*_faults.py"


def mutant_names() -> tuple[str, ...]:
    """The first argument of every `Mutant(...)`; importing the modules would import torch."""
    names: list[str] = []
    for path in sorted(Path(__file__).parent.glob(PATTERN)):
        names.extend(_names_in(path))
    return tuple(names)


def _names_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Mutant"), args=[ast.Constant(value=name), *_]):
                yield str(name)
