"""What is known of a user's model without values: shapes, ties, linears, and whether AXES names every parameter once."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from weft.core.dimension import default_sharding_rule
from weft.core.model_config import AxisTable, LinearShapes
from weft.core.shard import Stacked
from weft.errors import Fault, PlanError, counted
from weft.models.common.experts import expert_matrices
from weft.models.common.init import named_parameters
from weft.models.common.moe import Router
from weft.models.user_model import KEY

Shapes = Mapping[str, tuple[int, ...]]
"""Global parameter name -> shape."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model's parameters without values.

    Attributes:
        shapes: global name -> shape, tied ones under each name.
        ties: alias -> owner.
        linears: name of a linear -> features out, in.
        expert_linears: name of a parameter that holds a matrix of each expert -> their features out, in.
        embedding_rows: of the first embedding; 0 without one.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]
    linears: LinearShapes
    expert_linears: LinearShapes
    embedding_rows: int


def facts_of(blocks: Mapping[str, nn.Module], ties: Mapping[str, str], *, label: str) -> ModelFacts:
    """The facts of a chain.

    Args:
        ties: those that the user declares.
        label: of the model, for messages.

    Raises:
        PlanError: a tie names no parameter.
    """
    params = named_parameters(blocks)
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    tied_names = itertools.chain.from_iterable(ties.items())
    unknown = [name for name in tied_names if name not in shapes]
    if unknown:
        what = f"{label}: TIES names no parameter: {', '.join(unknown)}"
        raise PlanError(Fault(KEY, what, fix="names of parameters, as named_parameters() has them"))
    all_ties = dict(ties)
    owners: dict[int, str] = {}
    for name, param in params.items():
        owner = owners.setdefault(id(param), name)
        if owner != name:
            all_ties.setdefault(name, owner)
    linears: LinearShapes = {}
    expert_linears: LinearShapes = {}
    for name, module in _modules_of_layers(blocks):
        if type(module) is nn.Linear:
            linears[name] = (module.out_features, module.in_features)
        for matrix, sizes in expert_matrices(module).items():
            expert_linears[f"{name}.{matrix}"] = sizes
    return ModelFacts(shapes, all_ties, linears, expert_linears, _rows_of_embedding(blocks))


def _modules_of_layers(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside numbered blocks, without those of weft's routers, which use their weights alone."""
    for block_name, block in blocks.items():
        if not is_numbered(block_name):
            continue
        used_by_routers: set[nn.Module] = set()
        for path, module in block.named_modules():
            if isinstance(module, Router):
                used_by_routers.update(module.children())
            elif path and module not in used_by_routers:
                yield f"{block_name}.{path}", module


def _rows_of_embedding(blocks: Mapping[str, nn.Module]) -> int:
    """The number of rows of the first embedding; 0 without one."""
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, nn.Embedding):
                return module.num_embeddings
    return 0


def is_numbered(name: str) -> bool:
    """Whether a block is one of several: layer0, h1, 2."""
    return name[-1].isdigit()


def rows_of(name: str, table: Mapping[str, Any]) -> list[str]:
    """The patterns of a table that match a name."""
    return [pattern for pattern in table if fnmatchcase(name, pattern)]


def axes_faults(shapes: Shapes, table: AxisTable) -> Iterator[Fault]:
    """Parameters that AXES misses or names twice, rows of another length, rows that match nothing."""
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in shapes.items():
        rows = rows_of(name, table)
        used.update(rows)
        if not rows:
            missing.append(name)
        elif len(rows) > 1:
            yield Fault(
                "AXES",
                f"names parameter {name} twice",
                got=" and ".join(map(repr, rows)),
                fix="narrow one pattern",
            )
        else:
            (row,) = rows
            num_axes = len(table[row])
            if num_axes != len(shape):
                yield Fault(
                    "AXES",
                    f"row {row!r} does not fit parameter {name}",
                    got=f"{num_axes} axes for shape {list(shape)}",
                    fix="one axis for each dim",
                )
    if missing:
        yield _missing_fault(missing, shapes)
    for pattern in table:
        if pattern not in used:
            first_names = list(shapes)[:3]
            yield Fault(
                "AXES",
                f"row {pattern!r} matches no parameter",
                got=f"{', '.join(first_names)}, ...",
                fix="remove the row, or correct its pattern",
            )


def _missing_fault(missing: list[str], shapes: Shapes) -> Fault:
    first, *others = missing
    row = (None,) * len(shapes[first])
    what = f"misses parameter {first}"
    if others:
        what += f" and {counted(len(others), 'other')}"
    return Fault("AXES", what, fix=f"add rows, such as {first!r}: {row}")


def units_of_axes(shapes: Shapes, table: AxisTable, config: Any) -> dict[str, int]:
    """Units of the axes that some mesh axis may shard: a field of the config of that name, else the
    greatest common divisor of the lengths of all dims with this axis.
    """
    shardable = default_sharding_rule()
    sizes: dict[str, int] = {}
    for axis, lengths in _lengths_of_axes(shapes, table).items():
        if axis not in shardable:
            continue
        divisor = math.gcd(*lengths)
        field = getattr(config, axis, None)
        sizes[axis] = divisor
        if isinstance(field, int) and field > 0 and divisor % field == 0:
            sizes[axis] = field
    return sizes


def _lengths_of_axes(shapes: Shapes, table: AxisTable) -> dict[str, list[int]]:
    """Logical axis -> lengths of the dims that have it; of a part of a `Stacked` dim its units."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for name, shape in shapes.items():
        rows = rows_of(name, table)
        if len(rows) != 1:
            continue
        axes = table[rows[0]]
        if len(axes) != len(shape):
            continue
        for axis, length in zip(axes, shape, strict=True):
            if isinstance(axis, Stacked):
                for part, units in axis.parts:
                    lengths[part].append(units)
            else:
                lengths[axis].append(length)
    return lengths
