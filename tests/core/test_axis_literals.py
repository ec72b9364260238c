"""Names of mesh axes as string constants appear only in the module of their dimension and in the config."""

from __future__ import annotations

import ast
from pathlib import Path

import weft
from weft.core.dimension import all_axes

ROOT = Path(weft.__file__).parent
ALLOWED = {f"parallel/{axis}.py" for axis in all_axes()}


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the string constants that stand alone as statements."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
    return found


def axis_literals(source: str) -> list[tuple[int, str]]:
    """Line and value of each string constant that equals the name of an axis."""
    if not any(f'"{axis}"' in source or f"'{axis}'" in source for axis in all_axes()):
        return []  # without the cost of parsing
    tree = ast.parse(source)
    ignored = docstrings(tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in all_axes() and id(node) not in ignored:
            found.append((node.lineno, str(node.value)))
    return found


def test_axis_names_are_constants_of_their_dimension_alone() -> None:
    offending: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in ALLOWED or name.startswith("config/"):
            continue
        for line, axis in axis_literals(path.read_text(encoding="utf-8")):
            offending.append(f"{name}:{line} {axis!r}")
    assert not offending, (
        "import AXIS of weft.parallel.x, or ask weft.core.dimension for the role:\n"
        + "\n".join(offending)
    )


def test_the_scan_finds_a_literal_and_ignores_docstrings() -> None:
    assert axis_literals('"""tp"""\nsize = degree("tp")\n') == [(2, "tp")]
