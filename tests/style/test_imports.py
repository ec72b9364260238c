"""Import rules that the contracts of import-linter cannot express."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parents[1]


def imported_modules(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_torch_distributed_is_imported_by_the_process_transport_alone() -> None:
    users: set[str] = set()
    for path in ROOT.rglob("*.py"):
        if "distributed" not in path.read_text(encoding="utf-8"):
            continue  # without the cost of parsing
        if any(f"{name}.".startswith("torch.distributed.") for name in imported_modules(path)):
            users.add(path.relative_to(ROOT).as_posix())
    assert users == {
        "weft/comm/world_store.py",
        "weft/comm/process_groups.py",
        "weft/parallel/zero/distributed_checkpoint.py",  # what its checkpoints ask of a tensor
    }
