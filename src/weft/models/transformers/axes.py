"""Logical axes of the parameters of a decoder, from the tensor-parallel plan that transformers has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.shard import DimAxis
from weft.models.transformers.build import Architecture, param_names

Row = tuple[DimAxis | None, ...]


def axes_of(found: Architecture, values: Mapping[str, Any]) -> dict[str, Row]:
    """Global name -> axes; what the plan does not shard is whole on every rank."""
    return {
        name: (None,) * len(found.shapes[own]) for name, own in param_names(found).items()
    }
