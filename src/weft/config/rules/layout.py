"""Rules of the mesh with model, batch, pipeline, sequence and sites: what divides what, what a schedule takes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.config.rules.unused_keys import set_keys
from weft.config.schema import (
    BatchConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    SiteConfig,
    label_of,
)
from weft.core.axes import local_update_axis
from weft.core.dimension import (
    LayoutOptions,
    LayoutRequest,
    activation_axes,
    all_axes,
    dimensions,
    local_update_axes,
    pipeline_axis,
    plain_data_axes,
    position_axes,
    sequence_axes,
    uneven_axes,
)
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.core.sequence import length_unit
from weft.errors import Fault, UserError, counted, did_you_mean
from weft.layout.plan import sharding_rule_of
from weft.layout.stages import check_number_of_stages, check_stage_limit, split_by_counts
from weft.schedule.catalog import SCHEDULES, find

MOST_MICROBATCHES = 2**16
"""Largest number of micro-batches of one step on one rank; their schedule is a table."""
SITE_KEYS = ("every", "lr", "momentum", "wire", "overlap", "mix", "gbit_s")


def axes_divide(mesh: Mesh, model: ModelConfig) -> Iterator[Fault]:
    """Every logical axis of the model divides by the degree of the mesh axis that shards it."""
    for axis in all_axes():
        yield from axis_divides(mesh, model, axis)


def axis_divides(mesh: Mesh, model: ModelConfig, mesh_axis: str) -> Iterator[Fault]:
    """The logical axes that one mesh axis shards divide by its degree; those whose parts may have
    different lengths have an entry for each rank.
    """
    degree = mesh.degree(mesh_axis)
    sizes = sharded_sizes(model, mesh_axis)
    for axis in dimensions()[mesh_axis].uneven:
        size = model.axis_sizes().get(axis, degree)
        if size < degree:
            what = f"{mesh_axis}{degree} has more ranks than the model's {axis} has entries"
            fix = f"a mesh with at most {mesh_axis}{size}"
            yield Fault("mesh", what, got=f"{size} {axis}", need=f"{degree} or more", fix=fix)
    uneven = [axis for axis, size in sizes.items() if size % degree]
    if not uneven:
        return
    largest = divisors(*sizes.values())[-4:]
    choices = [f"{mesh_axis}{divisor}" for divisor in largest]
    yield Fault(
        "mesh",
        f"{mesh_axis}{degree} does not divide the model's {', '.join(uneven)}",
        got=", ".join(f"{size} {axis}" for axis, size in sizes.items()),
        need="a divisor of each",
        fix=f"use {' or '.join(choices)}",
    )


def sharded_sizes(model: ModelConfig, mesh_axis: str) -> dict[str, int]:
    """Units of the logical axes that a mesh axis shards into equal parts."""
    dimension = dimensions()[mesh_axis]
    sharded = set(dimension.params) - set(dimension.whole_if_uneven)
    may_be_uneven = uneven_axes()
    sizes: dict[str, int] = {
        axis: size
        for axis, size in model.axis_sizes().items()
        if axis in sharded and axis not in may_be_uneven
    }
    return sizes


def dimension_faults(
    mesh: Mesh, model: ModelConfig, parallel: ParallelConfig, *, mesh_axis: str
) -> Iterator[Fault]:
    """What the record of a dimension rejects, where the mesh has more than one rank along it."""
    find_faults = dimensions()[mesh_axis].faults
    if find_faults is not None and mesh.degree(mesh_axis) > 1:
        yield from find_faults(layout_request(mesh, model, parallel))


def layout_request(mesh: Mesh, model: ModelConfig, parallel: ParallelConfig) -> LayoutRequest:
    """The layout of a run, as dimensions read it."""
    axis_sizes = model.axis_sizes()
    rule = dict(sharding_rule_of(mesh, axis_sizes))
    local_sizes: dict[str, int] = {}
    for axis, size in axis_sizes.items():
        degree = mesh.degree(rule[axis]) if axis in rule else 1
        if size % degree == 0:
            local_sizes[axis] = size // degree
    return LayoutRequest(
        degrees={axis: mesh.degree(axis) for axis in all_axes()},
        model_name=label_of(model.family),
        model_kind=model.kind,
        local_sizes=local_sizes,
        axis_sizes=axis_sizes,
        options=LayoutOptions(
            sequence_parallel=parallel.sequence, context=parallel.context, zero=parallel.zero
        ),
    )


def batch_divides(mesh: Mesh, batch: BatchConfig) -> Iterator[Fault]:
    """The global batch is a whole number of micro-batches on every data rank."""
    ranks = mesh.degree(sequence_axes())
    micro_size = batch.micro_size
    global_size = batch.global_size
    unit = ranks * micro_size
    data_ranks = counted(ranks, "data rank")
    if global_size % unit:
        yield Fault(
            "batch.global_size",
            "does not divide into micro-batches",
            got=str(global_size),
            need=f"a multiple of {unit} = {data_ranks} x micro_size {micro_size}",
        )
    elif global_size // unit > MOST_MICROBATCHES:
        yield Fault(
            "batch.micro_size",
            "makes too many micro-batches",
            got=f"{global_size // unit} on each of {data_ranks}",
            need=f"at most {MOST_MICROBATCHES}",
        )


def statistics_are_of_ranks(mesh: Mesh, batch: BatchConfig, model: ModelConfig) -> Iterator[Fault]:
    """BatchNorm normalises whole micro-batches of neighbouring data ranks together."""
    size = batch.statistics_size
    if size is None:
        return
    key, ranks = "batch.statistics_size", mesh.degree(sequence_axes())
    num_micro, rest = divmod(size, batch.micro_size)
    if not model.is_opaque:
        what = f"is of BatchNorm, which {label_of(model.family)} has not"
        yield Fault(key, what, fix=f"leave {key} out")
    elif rest or not num_micro or ranks % num_micro:
        yield Fault(
            key,
            "is no number of micro-batches of neighbouring data ranks",
            got=str(size),
            need=f"micro_size {batch.micro_size} times a divisor of {counted(ranks, 'data rank')}",
        )


def layers_make_stages(
    mesh: Mesh, model: ModelConfig, pipeline: PipelineConfig, *, seq_len: int
) -> Iterator[Fault]:
    """There is a layer for every stage but the ends, and `pipeline.split` counts all layers."""
    num_ranks = mesh.degree(pipeline_axis())
    num_stages = num_ranks * pipeline.chunks
    split = pipeline.split
    if split and len(split) != num_stages:
        chunks = counted(pipeline.chunks, "chunk")
        yield Fault(
            "pipeline.split",
            "names another number of stages",
            got=f"{len(split)}: {as_words(split)}",
            need=f"{num_stages} = {pipeline_axis()}{num_ranks} x {chunks}",
            fix="leave pipeline.split out",
        )
        return
    try:
        check_stage_limit(num_stages)  # before the blocks of thousands of layers are made
        blocks = model.block_specs(seq_len)
        if split:
            split_by_counts(blocks, split)
        else:
            check_number_of_stages(blocks, num_stages)
    except UserError as error:
        key = _stage_key(pipeline)
        for fault in error.faults:
            yield replace(fault, key=key)


def _stage_key(pipeline: PipelineConfig) -> str:
    """The key that decides the number of stages."""
    if pipeline.split:
        return "pipeline.split"
    return "pipeline.chunks" if pipeline.chunks > 1 else "mesh"


def schedule_takes_sizes(
    mesh: Mesh, batch: BatchConfig, pipeline: PipelineConfig
) -> Iterator[Fault]:
    """The schedule exists, and has a table for this many ranks, chunks and micro-batches."""
    name = pipeline.schedule
    try:
        schedule = find(name, pipeline.table)
    except UserError as error:
        yield from error.faults
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Fault(
            "pipeline.schedule",
            "cannot read a table there",
            got=f"{name!r}: {error}",
            fix=did_you_mean(name, SCHEDULES),
        )
        return
    faults = schedule.faults(
        ranks=mesh.degree(pipeline_axis()),
        chunks=pipeline.chunks,
        microbatches=max(batch.num_micro(mesh.degree(sequence_axes())), 1),
    )
    batch_is_whole = not any(batch_divides(mesh, batch))
    for fault in faults:
        if batch_is_whole or fault.key == "pipeline.chunks":
            yield fault


def sequence_divides(
    mesh: Mesh, model: ModelConfig, parallel: ParallelConfig, *, seq_len: int
) -> Iterator[Fault]:
    """A sequence splits into two chunks a context rank and, under sequence parallelism, equal parts
    for the tensor ranks.
    """
    unit = length_unit(mesh, sequence_parallel=parallel.sequence)
    if model.kind != "tokens" or seq_len % unit == 0:
        return
    axes: list[str] = []
    reasons: list[str] = []
    for axis in position_axes():
        if mesh.degree(axis) > 1:
            axes.append(f"{axis}{mesh.degree(axis)}")
            reasons.append(f"two chunks for each of {axes[-1]}")
    for axis in activation_axes():
        if parallel.sequence:
            axes.append(f"{axis}{mesh.degree(axis)}")
            reasons.append(f"{axes[-1]} under parallel.sequence")
    yield Fault(
        "data.seq_len",
        f"does not divide by {' x '.join(axes)}",
        got=str(seq_len),
        need=f"a multiple of {unit}: {', '.join(reasons)}",
    )


def sequence_parallel_has_sequences(
    model: ModelConfig, parallel: ParallelConfig
) -> Iterator[Fault]:
    """Sequence parallelism shards activations of sequences."""
    if parallel.sequence and model.kind != "tokens":
        yield Fault(
            "parallel.sequence",
            f"shards activations along the sequence, and {label_of(model.family)} reads {model.kind}",
            got="True",
            need="False",
        )


def order_is_fixed(
    mesh: Mesh, batch: BatchConfig, parallel: ParallelConfig, optim: OptimConfig, *, is_wanted: bool
) -> Iterator[Fault]:
    """Deterministic runs: sums over micro-batches and data ranks are one binary tree."""
    if not is_wanted or any(batch_divides(mesh, batch)):
        return
    data = [name for name in mesh.wide_axes if name in plain_data_axes()]
    others = [name for name in sequence_axes() if name not in data]
    num_micro = batch.global_size // (batch.micro_size * mesh.degree(tuple(others)))
    key, fix = "deterministic", "leave deterministic out"
    uneven = [
        f"{name}{mesh.degree(name)}" for name in data if not is_power_of_two(mesh.degree(name))
    ]
    if uneven:
        yield Fault(
            key,
            "adds gradients in a binary tree over the data ranks",
            got=" ".join(uneven),
            need="a power of two",
            fix=fix,
        )
    elif not is_power_of_two(num_micro):
        yield Fault(
            key,
            "adds gradients in a binary tree over the micro-batches of a step",
            got=f"{num_micro} over all data ranks",
            need="a power of two",
            fix=f"change batch.global_size or batch.micro_size, or {fix}",
        )
    if parallel.zero < 2 and batch.normalised_size > batch.micro_size:
        yield Fault(
            key,
            "gives a rank consecutive micro-batches, and BatchNorm normalises those of several ranks",
            got=f"parallel.zero {parallel.zero} and batch.statistics_size {batch.statistics_size}",
            fix="--parallel.zero 2, where a rank has one of each group",
        )
    for axis in others:
        inside = [name for name in data if comes_first(mesh, axis, name)]
        if inside:
            yield Fault(
                key,
                f"assigns micro-batches to {' and '.join(data)} first",
                got=str(mesh),
                need=f"{' and '.join(data)} before {axis}",
                fix=f"move {axis} behind {inside[-1]} in the mesh",
            )
    rules = {optim.name, *(group.optimizer for group in optim.groups)}
    if "adafactor" in rules and parallel.zero:
        yield sums_have_no_order("adafactor adds sums of rows and columns", zero=parallel.zero)


def sums_have_no_order(what: str, *, zero: int) -> Fault:
    """An optimizer adds sums of its own over data ranks, in no fixed order."""
    return Fault(
        "deterministic",
        f"{what} over the ranks of ZeRO",
        got=f"parallel.zero {zero}",
        need="0",
        fix="--parallel.zero 0, or leave deterministic out",
    )


def sites_exist(mesh: Mesh, site: SiteConfig) -> Iterator[Fault]:
    """The section is read only where the mesh has an axis of local updates, and `mix` only where
    exchanges overlap with steps.
    """
    axis = local_update_axis(mesh)
    if axis is None:
        yield from _unread_keys(site)
        return
    names = [name for name, _ in mesh.axes]
    if names[0] != axis:
        outermost = [f"{axis}{mesh.degree(axis)}"]
        outermost += [f"{name}{degree}" for name, degree in mesh.axes if name != axis]
        yield Fault(
            "mesh",
            f"the ranks of a {axis} are not next to each other",
            got=repr(mesh.text),
            need=f"{axis} first",
            fix=f'--mesh "{" ".join(outermost)}"',
        )
    if not site.overlap:
        what = "is set, and site.overlap is 0: every site takes the outer parameters whole"
        yield from set_keys(site, "site", ("mix",), what, fix="--site.overlap 1, or leave it out")
    if site.overlap >= site.every:
        yield Fault(
            "site.overlap",
            "an exchange would not end before the next one begins",
            got=f"{site.overlap} with site.every {site.every}",
            need=f"below {site.every}",
            fix=f"--site.overlap {site.every - 1}" if site.every > 1 else "--site.overlap 0",
        )


def _unread_keys(site: SiteConfig) -> Iterator[Fault]:
    """Keys that have other values than their defaults, on a mesh without sites; the run.toml of a run
    over sites has them, so leaving them out is no fix.
    """
    (axis,) = local_update_axes()
    what = f"is set, and the mesh has no axis {axis}"
    fields = SiteConfig.model_fields
    for name in SITE_KEYS:
        fix = f'--mesh "{axis}2 ...", or --{axis}.{name} {fields[name].default}'
        yield from set_keys(site, axis, (name,), what, fix=fix)


def sites_take_options(
    mesh: Mesh, precision: PrecisionConfig, *, deterministic: bool
) -> Iterator[Fault]:
    """Options that are not possible where sites train apart."""
    axis = local_update_axis(mesh)
    if axis is None:
        return
    if deterministic:
        what = f"fixes the bits for every number of data ranks, and {axis} changes the algorithm"
        yield Fault("deterministic", what, got="True", need="False", fix="leave deterministic out")
    if precision.params not in ("float32", "float64"):
        yield Fault(
            "precision.params",
            "outer steps are smaller than its digits",
            got=precision.params,
            need="float32 or float64",
            fix="--precision.params float32; compute may stay as it is",
        )


def is_power_of_two(number: int) -> bool:
    """Whether a positive number is 1, 2, 4, ..."""
    return number & (number - 1) == 0


def comes_first(mesh: Mesh, axis: str, other: str) -> bool:
    """Whether one wide axis of the mesh stands before another."""
    wide = mesh.wide_axes
    return axis in wide and other in wide and wide.index(axis) < wide.index(other)


def divisors(*numbers: int) -> tuple[int, ...]:
    """Common divisors of all `numbers`, ascending."""
    common = math.gcd(*numbers)
    small = [each for each in range(1, math.isqrt(common) + 1) if common % each == 0]
    large = [common // each for each in reversed(small) if each * each != common]
    return (*small, *large)


def as_words(counts: Sequence[int]) -> str:
    """Numbers as the words of a flag."""
    return " ".join(map(str, counts))
