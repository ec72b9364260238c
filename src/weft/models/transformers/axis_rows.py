"""Logical axes of the parameters of a decoder: experts, and what a run has found by tracing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from weft.core.shard import DimAxis, Stacked
from weft.models.transformers.build import Architecture, param_names
from weft.models.transformers.sizes import AXES
from weft.models.user_facts import rows_of

EXPERTS = "experts"
Row = tuple[DimAxis | None, ...]


def shards(found: Architecture, values: Mapping[str, Any]) -> Callable[[str], bool]:
    """Path of a module in transformers -> whether axes shard something in it besides whole experts."""
    return _paths_of(found, values, lambda row: any(axis and str(axis) != EXPERTS for axis in row))


def shards_parts(found: Architecture, values: Mapping[str, Any]) -> Callable[[str], bool]:
    """Path of a module in transformers -> whether axes shard a fused weight in it by its parts."""

    def is_meant(row: Row) -> bool:
        return any(isinstance(axis, Stacked) and str(axis) != EXPERTS for axis in row)

    return _paths_of(found, values, is_meant)


def _paths_of(
    found: Architecture, values: Mapping[str, Any], is_meant: Callable[[Row], bool]
) -> Callable[[str], bool]:
    stored = _stored(values)
    meant = [
        own
        for name, own in param_names(found).items()
        if any(is_meant(stored[row]) for row in rows_of(name, stored))
    ]
    return lambda path: any(own.startswith(f"{path}.") for own in meant)


def _stored(values: Mapping[str, Any]) -> dict[str, Row]:
    rows = json.loads(values[AXES] or "{}")
    return {pattern: tuple(map(_axis, row)) for pattern, row in rows.items()}


def axes_of(found: Architecture, values: Mapping[str, Any]) -> dict[str, Row]:
    """Global name -> axes; what nothing shards is whole on every rank."""
    stored = _stored(values)
    table: dict[str, Row] = {}
    for name, own in param_names(found).items():
        rows = rows_of(name, stored)
        table[name] = stored[rows[0]] if rows else _own_row(found, own)
    return table


def _own_row(found: Architecture, own: str) -> Row:
    """Experts by their first dim; all else is whole."""
    shape = found.shapes[own]
    whole = (None,) * len(shape)
    number = found.experts.get(own)
    if number is None:
        return whole
    # the rows of all experts may be in one dim
    experts = EXPERTS if shape[0] == number else Stacked((EXPERTS, number))
    return (experts, *whole[1:])


def axes_text(table: Mapping[str, Row]) -> str:
    """The rows that shard something, as JSON."""
    rows = {name: list(map(_json, row)) for name, row in table.items() if any(row)}
    return json.dumps(rows)


def _json(axis: DimAxis | None) -> Any:
    return {"stacked": axis.parts} if isinstance(axis, Stacked) else axis


def _axis(value: Any) -> DimAxis | None:
    if isinstance(value, dict):
        return Stacked(*((name, units) for name, units in value["stacked"]))
    axis: str | None = value
    return axis
