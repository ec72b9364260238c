"""Help texts of a dataclass's fields, from its source code: `metadata["help"]`, texts below, comments. Imports no torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import tokenize


def field_descriptions(config: type) -> dict[str, str]:
    """Help of each field: its `metadata["help"]`, else the text below it, else the comment behind it."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):
        source = ""
    found: dict[str, str] = {}
    if source:
        found.update(_comments(source))
        found.update(_texts_below(source))
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            found[field.name] = str(field.metadata["help"])
    return found


def _comments(source: str) -> dict[str, str]:
    """Name at the start of a line -> comment at its end."""
    found: dict[str, str] = {}
    lines = iter(source.splitlines(keepends=True))

    def read_line() -> str:
        return next(lines, "")

    for token in tokenize.generate_tokens(read_line):
        if token.type != tokenize.COMMENT:
            continue
        before_colon, colon, _ = token.line.partition(":")
        name = before_colon.strip()
        if colon and name.isidentifier():
            found[name] = token.string.lstrip("# ")
    return found


def _texts_below(source: str) -> dict[str, str]:
    """Name of a field -> the string that stands below it."""
    (definition,) = ast.parse(source).body
    if not isinstance(definition, ast.ClassDef):
        return {}
    found: dict[str, str] = {}
    for statement, below in itertools.pairwise(definition.body):
        name = _field_name(statement)
        text = _text_of(below)
        if name is not None and text is not None:
            words = text.split()
            found[name] = " ".join(words)
    return found


def _field_name(statement: ast.stmt) -> str | None:
    """The field that a statement of a class defines; None where it is something else."""
    if not isinstance(statement, ast.AnnAssign):
        return None
    target = statement.target
    return target.id if isinstance(target, ast.Name) else None


def _text_of(statement: ast.stmt) -> str | None:
    """The string that a statement consists of; None where it is something else."""
    if not isinstance(statement, ast.Expr):
        return None
    value = statement.value
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    return None
