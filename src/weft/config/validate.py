"""Validation of a run config: whether mesh, model, batch, pipeline and sequence fit together. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from weft.config import suggestions
from weft.config.checks import Check, Suggestion
from weft.config.run import Run
from weft.core.dimension import (
    Dimension,
    LayoutOptions,
    LayoutRequest,
    activation_axes,
    all_axes,
    default_sharding_rule,
    dimensions,
    pipeline_axis,
    position_axes,
    uneven_axes,
)
from weft.core.precision import dtype_faults
from weft.core.sequence import length_unit
from weft.errors import Fault, UserError, did_you_mean
from weft.layout.stages import split_by_cost, split_by_counts
from weft.schedule.catalog import SCHEDULES, find

MOST_MICROBATCHES = 2**16
"""Largest number of micro-batches of one step on one rank; their schedule is a table."""
NUM_BYTES = 256
"""Number of byte tokens."""


def axes_divide(run: Run) -> Iterable[Fault]:
    """Every logical axis of the model divides by the degree of the mesh axis that shards it."""
    for axis in all_axes():
        yield from axis_divides(run, axis)


def axis_divides(run: Run, mesh_axis: str) -> Iterable[Fault]:
    """The logical axes that one mesh axis shards divide by its degree."""
    degree = run.device_mesh.degree(mesh_axis)
    sizes = _sharded_sizes(run, mesh_axis)
    uneven = [axis for axis, size in sizes.items() if size % degree]
    if not uneven:
        return
    largest = divisors(*sizes.values())[-4:]
    yield Fault(
        "mesh",
        f"{mesh_axis}{degree} does not divide the model's {', '.join(uneven)}",
        got=", ".join(f"{size} {axis}" for axis, size in sizes.items()),
        need="a divisor of each",
        fix=f"use {' or '.join(f'{mesh_axis}{divisor}' for divisor in largest)}",
    )


def _sharded_sizes(run: Run, mesh_axis: str) -> dict[str, int]:
    """Units of the logical axes that a mesh axis shards into equal parts."""
    sharded = dimensions()[mesh_axis].params
    may_be_uneven = uneven_axes()
    sizes: dict[str, int] = {}
    for axis, size in run.model.axis_sizes().items():
        if axis in sharded and axis not in may_be_uneven:
            sizes[axis] = size
    return sizes


def dimension_faults(run: Run, mesh_axis: str) -> Iterable[Fault]:
    """What the record of a dimension rejects, where the mesh has more than one rank along it."""
    find = dimensions()[mesh_axis].faults
    if find is not None and run.device_mesh.degree(mesh_axis) > 1:
        yield from find(layout_request(run))


def layout_request(run: Run) -> LayoutRequest:
    """The layout of a run, as dimensions read it."""
    mesh, rule = run.device_mesh, default_sharding_rule()
    axis_sizes = run.model.axis_sizes()
    local_sizes: dict[str, int] = {}
    for axis, size in axis_sizes.items():
        degree = mesh.degree(rule[axis]) if axis in rule else 1
        if size % degree == 0:
            local_sizes[axis] = size // degree
    return LayoutRequest(
        degrees={axis: mesh.degree(axis) for axis in all_axes()},
        model_name=run.model.name,
        model_kind=run.model.kind,
        local_sizes=local_sizes,
        axis_sizes=axis_sizes,
        options=LayoutOptions(
            sequence_parallel=run.parallel.sequence,
            context=run.parallel.context,
            zero=run.parallel.zero,
        ),
    )


def batch_divides(run: Run) -> Iterable[Fault]:
    """The global batch is a whole number of micro-batches on every data rank."""
    ranks, micro_size, global_size = run.num_data_ranks, run.batch.micro_size, run.batch.global_size
    unit = ranks * micro_size
    if global_size % unit:
        data_ranks = "1 data rank" if ranks == 1 else f"{ranks} data ranks"
        need = f"a multiple of {unit} = {data_ranks} x micro_size {micro_size}"
        yield Fault(
            "batch.global_size",
            "does not divide into micro-batches",
            got=str(global_size),
            need=need,
        )
    elif global_size // unit > MOST_MICROBATCHES:
        got = f"{global_size // unit} on each of {ranks} data ranks"
        yield Fault(
            "batch.micro_size",
            "makes too many micro-batches",
            got=got,
            need=f"at most {MOST_MICROBATCHES}",
        )


def layers_make_stages(run: Run) -> Iterable[Fault]:
    """There is a layer for every stage, and `pipeline.split` counts all of them."""
    blocks = run.model.block_specs(run.data.seq_len)
    split = run.pipeline.split
    if split and len(split) != run.num_stages:
        need = f"{run.num_stages} = {pipeline_axis()}{run.pipeline_size} x {run.pipeline.chunks} chunks"
        got = f"{len(split)}: {as_words(split)}"
        yield Fault(
            "pipeline.split",
            "names another number of stages",
            got=got,
            need=need,
            fix="leave pipeline.split out",
        )
        return
    try:
        if split:
            split_by_counts(blocks, split)
        else:
            split_by_cost(blocks, run.num_stages)
    except UserError as error:
        key = _stage_key(run)
        yield from (replace(fault, key=key) for fault in error.faults)


def _stage_key(run: Run) -> str:
    """The key that decides the number of stages."""
    if run.pipeline.split:
        return "pipeline.split"
    return "pipeline.chunks" if run.pipeline.chunks > 1 else "mesh"


def schedule_takes_sizes(run: Run) -> Iterable[Fault]:
    """The schedule exists, and has a table for this many ranks, chunks and micro-batches."""
    name = run.pipeline.schedule
    try:
        schedule = find(name)
    except UserError as error:
        return error.faults
    except (OSError, UnicodeDecodeError) as error:
        fix = did_you_mean(name, SCHEDULES)
        return (
            Fault(
                "pipeline.schedule",
                "cannot read a table there",
                got=f"{name!r}: {error}",
                fix=fix,
            ),
        )
    faults = schedule.faults(
        ranks=run.pipeline_size,
        chunks=run.pipeline.chunks,
        microbatches=max(run.num_micro, 1),
    )
    batch_is_whole = not any(batch_divides(run))
    return tuple(fault for fault in faults if batch_is_whole or fault.key == "pipeline.chunks")


def sequence_divides(run: Run) -> Iterable[Fault]:
    """A sequence splits into two chunks a context rank and, under sequence parallelism, equal parts
    for the tensor ranks.
    """
    mesh, length = run.device_mesh, run.data.seq_len
    unit = length_unit(mesh, sequence_parallel=run.parallel.sequence)
    if run.model.kind != "tokens" or length % unit == 0:
        return
    axes: list[str] = []
    reasons: list[str] = []
    for axis in position_axes():
        if mesh.degree(axis) > 1:
            axes.append(f"{axis}{mesh.degree(axis)}")
            reasons.append(f"two chunks for each of {axes[-1]}")
    for axis in activation_axes():
        if run.parallel.sequence:
            axes.append(f"{axis}{mesh.degree(axis)}")
            reasons.append(f"{axes[-1]} under parallel.sequence")
    need = f"a multiple of {unit}: {', '.join(reasons)}"
    yield Fault(
        "data.seq_len",
        f"does not divide by {' x '.join(axes)}",
        got=str(length),
        need=need,
    )


def sequence_parallel_has_sequences(run: Run) -> Iterable[Fault]:
    """Sequence parallelism shards activations of sequences."""
    if run.parallel.sequence and run.model.kind != "tokens":
        what = f"shards activations along the sequence, and {run.model.name} reads {run.model.kind}"
        yield Fault(
            "parallel.sequence",
            what,
            got="True",
            need="False",
        )


def sequence_fits_model(run: Run) -> Iterable[Fault]:
    """The model takes sequences of this length."""
    fault = run.model.check_seq_len(run.data.seq_len)
    return () if fault is None else (fault,)


def vocabulary_holds_bytes(run: Run) -> Iterable[Fault]:
    """Where the default text is read as bytes, the vocabulary has all of them; other sources are
    checked when opened.
    """
    is_default_text = (
        run.model.kind == "tokens" and run.data.source == "stdlib" and not run.data.mix
    )
    if not is_default_text or run.data.tokenizer != "bytes":
        return
    size = run.model.axis_sizes().get("vocab", NUM_BYTES)
    if size < NUM_BYTES:
        need, fix = f"at least {NUM_BYTES} for bytes", f"--model.vocab {NUM_BYTES}"
        yield Fault(
            "model.vocab",
            "is smaller than the tokenizer's",
            got=str(size),
            need=need,
            fix=fix,
        )


def number_types_fit(run: Run) -> Iterable[Fault]:
    """Parameters and gradient sums are at least as precise as the computation."""
    types = run.precision
    return dtype_faults(
        params=types.params,
        compute=types.compute,
        reduce=types.reduce,
    )


def spike_is_above_the_median(run: Run) -> Iterable[Fault]:
    """A spike is larger than the losses before it."""
    factor = run.guard.spike
    if 0 < factor <= 1:
        yield Fault(
            "guard.spike",
            "every loss would be a spike",
            got=f"{factor:g}",
            need="above 1, or 0",
            fix="--guard.spike 3",
        )


def divisors(*numbers: int) -> tuple[int, ...]:
    """Common divisors of all `numbers`, ascending."""
    candidates = range(1, min(numbers) + 1)
    return tuple(each for each in candidates if all(number % each == 0 for number in numbers))


def as_words(counts: Sequence[int]) -> str:
    """Numbers as the words of a flag."""
    return " ".join(map(str, counts))


def _no_suggestions(run: Run) -> Iterable[Suggestion]:
    """None: the fault names a fix itself."""
    return ()


def _smaller_or_dividing(mesh_axis: str) -> Callable[[Run], Iterable[Suggestion]]:
    """Degrees of the axis that divide the sizes it shards."""

    def suggest(run: Run) -> Iterable[Suggestion]:
        sizes = _sharded_sizes(run, mesh_axis).values()
        return suggestions.degrees_of_axis(run, mesh_axis, divisors(*sizes))

    return suggest


def _alternatives(dimension: Dimension) -> Callable[[Run], Iterable[Suggestion]]:
    """The alternatives that a dimension names, then smaller degrees of its axis."""

    def suggest(run: Run) -> Iterable[Suggestion]:
        for key, value in dimension.alternatives:
            yield {key: value}
        yield from suggestions.smaller_degrees(run, dimension.name)

    return suggest


def _dimension_checks(dimension: Dimension) -> Iterable[Check]:
    """The checks that follow from the record of a dimension."""
    axis = dimension.name
    if dimension.params:
        yield Check(
            ("mesh", "model"), lambda run: axis_divides(run, axis), _smaller_or_dividing(axis)
        )
    if dimension.faults is not None:
        yield Check(
            ("mesh", "model", "parallel"),
            lambda run: dimension_faults(run, axis),
            _alternatives(dimension),
        )


CHECKS = (
    *(check for dimension in dimensions().values() for check in _dimension_checks(dimension)),
    Check(("mesh", "batch"), batch_divides, suggestions.batch_sizes),
    Check(("mesh", "model", "pipeline"), layers_make_stages, suggestions.stages),
    Check(("mesh", "batch", "pipeline"), schedule_takes_sizes, suggestions.schedules),
    Check(("mesh", "data.seq_len", "parallel.sequence"), sequence_divides, suggestions.lengths),
    Check(
        ("model", "parallel.sequence"),
        sequence_parallel_has_sequences,
        suggestions.no_sequence_parallelism,
    ),
    Check(("model", "data.seq_len"), sequence_fits_model, suggestions.lengths),
    Check(
        ("model.vocab", "data.source", "data.tokenizer"), vocabulary_holds_bytes, _no_suggestions
    ),
    Check(("precision",), number_types_fit, _no_suggestions),
    Check(("guard.spike",), spike_is_above_the_median, _no_suggestions),
)
"""Checks that depend on the run alone; a fault keeps its own fix where no suggestion removes it."""
