"""Parallel dimensions as records: what a mesh axis shards, what varies along it, its traffic, faults and transform.

A dimension is one module `weft/parallel/x.py` with a constant `DIMENSION`; `dimensions()` finds
these modules. Mesh, sharding rule, gradient rule, config validation, `weft explain` and
`parallelize` read the records. Modules below `weft.parallel` ask for axes by their role
(`token_axes()`, `pipeline_axis()`), never by name. See docs/extend.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from weft.errors import Fault

PACKAGE = "weft.parallel"

BatchShard = Literal["sequences", "positions"]
"""Part of a batch that differs between the ranks of an axis: whole sequences, or positions of the
same sequences.
"""

Transform = Callable[..., Collection[str]]
"""`transform(blocks, *, plan, comm, axes, axis_sizes, chain, dropout)`: changes this rank's blocks
(name -> module) in place.

`axes` is the table of logical axes, `axis_sizes` the full length of each logical axis, `chain` the
whole model before it was sharded, on the meta device (None where nothing is to be traced);
`dropout` takes how the tensors of dropout are sharded.
Returns the global names of the parameters whose gradients are partial sums along the axis. It is
called under every mesh, also where the axis has one rank.
"""


@dataclass(frozen=True)
class LayoutOptions:
    """What a layout says besides the sizes of its mesh axes: keys of the section `[parallel]`."""

    sequence_parallel: bool = False
    tp_overlap: bool = False
    context: str = "ring"
    zero: int = 0


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """A layout that is asked for, as far as a dimension needs it to accept or reject it.

    Attributes:
        degrees: mesh axis -> number of ranks along it, 1 for axes that the mesh does not name.
        model_name: family of the model.
        model_kind: "tokens", "images" or "arrays".
        local_sizes: logical axis -> units on one rank ("heads": 4); axes that do not divide evenly
            are left out.
        axis_sizes: logical axis -> units of the whole model.
        options: the rest of the layout.
    """

    degrees: Mapping[str, int]
    model_name: str
    model_kind: str
    local_sizes: Mapping[str, int]
    axis_sizes: Mapping[str, int]
    options: LayoutOptions


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One way to divide a training step over ranks: a mesh axis and all that the other modules know
    of it.

    Attributes:
        name: of the mesh axis, as in the mesh text.
        summary: what it shards, for `weft explain`: "tensor: heads, feed-forward and vocabulary are
            sharded".
        nesting: order of dimensions, outermost first: where weft writes a mesh itself, and in which
            transforms are applied.
        params: logical axes of parameters that are sharded over it.
        uneven: those of `params` that may be sharded into parts of different length.
        whole_if_uneven: those of `params` that every rank holds whole where the degree does not
            divide them.
        batch: what it shards of a batch. Where it shards anything, gradients vary along it and are
            summed over it, except those of parameters that it shards.
        shards_blocks: whether it splits the chain of blocks into pipeline stages.
        shards_activations: whether `parallel.sequence` shards activations along the sequence over
            it.
        shards_states: whether ZeRO shards states over it and not over the data axes outside of it,
            along which states are copies then.
        traffic: what is sent along it, for `weft explain`.
        faults: what is wrong with a layout where it has more than one rank; None: it takes every
            layout.
        local_updates: whether the model replicas along it train apart and are averaged every so many
            steps: gradients, norm and target counts are not summed over it, and a mesh with it does
            not compute what one device computes.
        alternatives: (config key, value) pairs that may remove a fault, tried before smaller
            degrees of the axis.
        transform: "module:function" of its `Transform`, imported when a model is built (torch is
            imported then); empty: none.
    """

    name: str
    summary: str
    nesting: int
    params: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()
    whole_if_uneven: tuple[str, ...] = ()
    batch: BatchShard | None = None
    shards_blocks: bool = False
    shards_activations: bool = False
    local_updates: bool = False
    shards_states: bool = False
    traffic: Callable[[LayoutOptions], str]
    faults: Callable[[LayoutRequest], Iterable[Fault]] | None = None
    alternatives: tuple[tuple[str, str], ...] = ()
    transform: str = ""

    @property
    def is_replicated(self) -> bool:
        """Whether its ranks compute the loss of the same tokens: the loss counts on the first of
        them.
        """
        return self.batch is None and not self.shards_blocks

    def load_transform(self) -> Transform | None:
        """The transform, imported now; None where the dimension changes no module."""
        if not self.transform:
            return None
        module, _, function = self.transform.partition(":")
        found: Any = getattr(importlib.import_module(module), function)
        return found  # type: ignore[no-any-return]


@cache
def dimensions() -> Mapping[str, Dimension]:
    """Every dimension by the name of its axis, outermost first: the modules of `weft.parallel` with
    a `DIMENSION`.
    """
    package = importlib.import_module(PACKAGE)
    found: list[Dimension] = []
    for info in pkgutil.iter_modules(package.__path__):
        if info.ispkg:
            continue
        module = importlib.import_module(f"{PACKAGE}.{info.name}")
        record = getattr(module, "DIMENSION", None)
        if isinstance(record, Dimension):
            found.append(record)
    found.sort(key=lambda dimension: dimension.nesting)
    by_name = {dimension.name: dimension for dimension in found}
    return MappingProxyType(by_name)


def all_axes() -> tuple[str, ...]:
    """Names of all mesh axes, outermost first."""
    return tuple(dimensions())


def sequence_axes() -> tuple[str, ...]:
    """Axes along which ranks read different sequences (data parallelism in the wide sense), those
    of local updates included.
    """
    return _axes_where(lambda dimension: dimension.batch == "sequences")


def position_axes() -> tuple[str, ...]:
    """Axes along which ranks hold different positions of the same sequences."""
    return _axes_where(lambda dimension: dimension.batch == "positions")


def token_axes() -> tuple[str, ...]:
    """Axes along which the tokens of one micro-batch differ between ranks."""
    return _axes_where(lambda dimension: dimension.batch is not None)


def token_exchange_axes() -> tuple[str, ...]:
    """Axes along which ranks hold different tokens and need each other within a block."""

    def exchanges_tokens(dimension: Dimension) -> bool:
        if dimension.batch is None:
            return False
        return bool(dimension.transform)

    return _axes_where(exchanges_tokens)


def local_update_axes() -> tuple[str, ...]:
    """Axes along which model replicas train apart between outer steps."""
    return _axes_where(lambda dimension: dimension.local_updates)


def exact_axes() -> tuple[str, ...]:
    """Axes over which a step computes what one device computes."""
    return _axes_where(lambda dimension: not dimension.local_updates)


def replicated_axes() -> tuple[str, ...]:
    """Axes along which ranks compute the loss of the same tokens: a sum over all ranks counts it on
    index 0 alone.
    """
    return _axes_where(lambda dimension: dimension.is_replicated)


def activation_axes() -> tuple[str, ...]:
    """Axes over which sequence parallelism shards activations between tensor-parallel regions."""
    return _axes_where(lambda dimension: dimension.shards_activations)


def _axes_where(condition: Callable[[Dimension], bool]) -> tuple[str, ...]:
    """Axes of the dimensions for which the condition holds, outermost first."""
    return tuple(dimension.name for dimension in dimensions().values() if condition(dimension))


@cache
def pipeline_axis() -> str:
    """The axis whose ranks hold different pipeline stages."""
    (name,) = _axes_where(lambda dimension: dimension.shards_blocks)
    return name


@cache
def plain_data_axes() -> tuple[str, ...]:
    """Axes that shard sequences and nothing else, outermost first: without those of experts, and of
    local updates.
    """

    def is_plain(dimension: Dimension) -> bool:
        if dimension.params or dimension.local_updates:
            return False
        return dimension.batch == "sequences"

    return _axes_where(is_plain)


def data_axis() -> str:
    """The first of `plain_data_axes`: ranks that another axis does not need go there."""
    first, *_ = plain_data_axes()
    return first


def default_sharding_rule() -> dict[str, str]:
    """Logical axis of a parameter -> the mesh axis that shards it, for every dimension, innermost
    first.
    """
    rule: dict[str, str] = {}
    outermost_first = list(dimensions().values())
    for dimension in reversed(outermost_first):
        for logical_axis in dimension.params:
            rule[logical_axis] = dimension.name
    return rule


def uneven_axes() -> frozenset[str]:
    """Logical axes that may be sharded into parts of different length."""
    found: set[str] = set()
    for dimension in dimensions().values():
        found.update(dimension.uneven)
    return frozenset(found)
