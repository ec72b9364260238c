"""Smaller cases of a run, for the search of the smallest one that fails: fewer ranks, options, layers, sequences. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from weft.config.changed_runs import with_degree
from weft.config.run import Run
from weft.config.small_runs import AcceptsSizes, reduced

DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("parallel.zero", 0),
    ("parallel.recompute", "none"),
    ("parallel.tp_overlap", False),
    ("parallel.sequence", False),
    ("parallel.context", "ring"),
    ("pipeline.schedule", "1f1b"),
    ("lora.rank", 0),
    ("data.packing", "stream"),
    ("optim.clip", 0.0),
    ("optim.state_dtype", "params"),
    ("precision.linears", "default"),
    ("precision.params", "float32"),
    ("precision.reduce", "float32"),
    ("precision.compute", "float32"),
)
"""Options that a smaller case may do without."""

Reduction = Callable[[Run], Iterator[Run]]
"""One way to make a run smaller: cases to try, the smallest first."""


def reductions(run: Run, accepts_sizes: AcceptsSizes) -> Iterator[Reduction]:
    """The ways to make a run smaller, in the order in which they are tried; each is applied to the
    case that the ones before it have left.
    """
    for axis, degree in run.device_mesh.axes:
        yield partial(_fewer_ranks, axis=axis, degree=degree)
    for key, value in DEFAULTS:
        yield partial(_default_option, key=key, value=value)
    yield _fewer_layers
    yield partial(_reduced_sizes, accepts_sizes=accepts_sizes)
    yield _fewer_micro_batches
    yield _single_sequences


def _fewer_ranks(run: Run, *, axis: str, degree: int) -> Iterator[Run]:
    for smaller in (1, 2):
        if smaller < degree:
            yield with_degree(run, axis, smaller)


def _default_option(run: Run, *, key: str, value: Any) -> Iterator[Run]:
    section, _, name = key.partition(".")
    options = getattr(run, section)
    if getattr(options, name) == value:
        return
    values = {key: value}
    if key == "pipeline.schedule":
        values["pipeline.chunks"] = 1
        values["pipeline.table"] = ()
    yield run.with_values(values)


def _fewer_layers(run: Run) -> Iterator[Run]:
    num_layers = run.model.architecture.get("layers", 0)
    for fewer in (1, 2, 3, 4):
        if fewer < num_layers:
            yield run.with_values({"model.layers": fewer})


def _reduced_sizes(run: Run, *, accepts_sizes: AcceptsSizes) -> Iterator[Run]:
    yield reduced(run, accepts_sizes)


def _fewer_micro_batches(run: Run) -> Iterator[Run]:
    for fewer in (1, 2):
        if fewer < run.num_micro:
            global_size = run.batch.micro_size * fewer * run.num_data_ranks
            yield run.with_values({"batch.global_size": global_size})


def _single_sequences(run: Run) -> Iterator[Run]:
    """Micro-batches of one sequence."""
    if run.batch.micro_size > 1:
        sizes = {
            "batch.micro_size": 1,
            "batch.statistics_size": run.batch.statistics_of(1),
            "batch.global_size": run.num_micro * run.num_data_ranks,
        }
        yield run.with_values(sizes)
