"""Values that remove a fault of a config, computed from its rule: for each kind of fault, nearest values first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from weft.config.rules.checks import Suggestion
from weft.config.rules.layout import MOST_MICROBATCHES, divisors, schedule_takes_sizes
from weft.config.schema import BatchConfig, PipelineConfig
from weft.core.dimension import (
    data_axis,
    local_update_axes,
    pipeline_axis,
    position_axes,
    sequence_axes,
)
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.core.sequence import length_unit
from weft.errors import UserError
from weft.schedule.catalog import DEFAULT_SCHEDULE, SCHEDULES, find

MAX_STEPS = 8
"""Multiples tried on either side of a value."""
MAX_DEGREES = 32
"""Smaller degrees of an axis that are tried one by one, before its divisors."""
MAX_DOUBLINGS = 23
"""Doublings of the micro-batch that are tried."""


def degrees_of_axis(mesh: Mesh, axis: str, degrees: Iterable[int]) -> Iterator[Suggestion]:
    """Other degrees of `axis`, nearest first: with as many ranks, the rest on the data axis, or
    with fewer ranks.
    """
    data = data_axis()
    now = mesh.degree(axis)
    num_ranks = mesh.degree(data) * now

    def distance(degree: int) -> tuple[float, int]:
        return abs(math.log(degree / now)), degree

    for degree in sorted(set(degrees), key=distance):
        data_ranks, rest = divmod(num_ranks, degree)
        if degree < now and rest == 0:
            yield {"mesh": mesh_text(mesh, {axis: degree, data: data_ranks})}
        yield {"mesh": mesh_text(mesh, {axis: degree})}


def smaller_degrees(mesh: Mesh, axis: str) -> Iterator[Suggestion]:
    """Fewer ranks along `axis`: the next smaller degrees, then divisors of the present one."""
    now = mesh.degree(axis)
    least = max(1, now - MAX_DEGREES)
    yield from degrees_of_axis(mesh, axis, range(least, now))
    divisors = [degree for degree in range(1, least) if now % degree == 0]
    yield from degrees_of_axis(mesh, axis, divisors)


def mesh_text(mesh: Mesh, change: dict[str, int]) -> str:
    """The mesh with other degrees; a new data axis stands after the pipeline axis, outside all
    others but those of local updates, which stay in the mesh with one rank, too. One rank is `dp1`.
    """
    data = data_axis()
    pipeline = pipeline_axis()
    degrees = dict(mesh.axes)
    names = list(degrees)
    if data not in names:
        is_local = [name in local_update_axes() for name in names]
        if pipeline in names:
            place = names.index(pipeline) + 1
        else:
            place = sum(is_local)
        names.insert(place, data)
    degrees.update(change)
    words: list[str] = []
    for name in names:
        degree = degrees.get(name, 1)
        if degree > 1 or name in local_update_axes():
            words.append(f"{name}{degree}")
    return " ".join(words) or f"{data}1"


def batch_sizes(mesh: Mesh, batch: BatchConfig) -> Iterator[Suggestion]:
    """Another number of sequences a step, or a micro-batch; first a smaller micro-batch, where one is
    larger than a data rank's part of the step.
    """
    num_data_ranks = mesh.degree(sequence_axes())
    largest = batch.global_size // num_data_ranks
    if 0 < largest < batch.micro_size:
        yield from _smaller_micro_sizes(mesh, batch, largest)
    for size, num_micro in _global_sizes(mesh, batch, range(MAX_STEPS)):
        if num_micro <= MOST_MICROBATCHES:
            yield {"batch.global_size": size}
    if largest >= batch.micro_size:
        yield from _smaller_micro_sizes(mesh, batch, batch.micro_size)
    larger = batch.micro_size
    for _ in range(MAX_DOUBLINGS):
        larger *= 2
        num_micro, rest = divmod(batch.global_size, num_data_ranks * larger)
        if not rest and 0 < num_micro <= MOST_MICROBATCHES:
            yield {"batch.micro_size": larger}


def sizes_of_statistics(mesh: Mesh, batch: BatchConfig) -> Iterator[Suggestion]:
    """Micro-batches with which so many samples are those of ranks; else those of fewer or more ranks."""
    num_data_ranks = mesh.degree(sequence_axes())
    size = batch.statistics_size or 0
    numbers = divisors(num_data_ranks)
    for num_ranks in reversed(numbers):
        if size % num_ranks == 0:
            yield {"batch.micro_size": size // num_ranks}
    for num_ranks in sorted(numbers, key=lambda each: abs(each * batch.micro_size - size)):
        yield {"batch.statistics_size": num_ranks * batch.micro_size}


def _smaller_micro_sizes(mesh: Mesh, batch: BatchConfig, largest: int) -> Iterator[Suggestion]:
    """Micro-batches of at most `largest` sequences that divide the step."""
    num_data_ranks = mesh.degree(sequence_axes())
    for size in range(largest, 0, -1):
        if batch.global_size % (num_data_ranks * size) == 0:
            yield {"batch.micro_size": size}


def _global_sizes(
    mesh: Mesh, batch: BatchConfig, steps: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Multiples of a micro-batch on every data rank, so many steps from the present global batch, with
    their numbers of micro-batches.
    """
    unit = mesh.degree(sequence_axes()) * batch.micro_size
    for number in steps:
        for size in nearest_multiples(batch.global_size, unit, number):
            if size > 0:
                yield size, size // unit


def nearest_multiples(value: int, unit: int, number: int) -> tuple[int, ...]:
    """The multiples of `unit` that are `number` further than the nearest on either side, the nearer
    first.

    >>> nearest_multiples(30, 8, 0), nearest_multiples(32, 8, 1)
    ((32, 24), (24, 40))
    """
    below = (value // unit - number) * unit
    above = (math.ceil(value / unit) + number) * unit

    def distance(multiple: int) -> tuple[int, int]:
        return abs(multiple - value), multiple

    return tuple(sorted({below, above}, key=distance))


def stages(
    mesh: Mesh, model: ModelConfig, pipeline: PipelineConfig, *, seq_len: int
) -> Iterator[Suggestion]:
    """Fewer stages, or layers for all of them; where `pipeline.split` is set, one that adds up."""
    layers_now = _num_layers(model, seq_len)
    for suggestion in _numbers_of_stages(mesh, model, pipeline):
        new_mesh = Mesh.parse(suggestion.get("mesh", mesh.text))
        chunks = suggestion.get("pipeline.chunks", pipeline.chunks)
        num_stages = new_mesh.degree(pipeline_axis()) * chunks
        num_layers = layers_now
        if "model.layers" in suggestion:
            new_model = model.model_copy(update={"layers": suggestion["model.layers"]})
            num_layers = _num_layers(new_model, seq_len)
        if num_stages > num_layers:
            continue
        if pipeline.split:
            yield {**suggestion, "pipeline.split": _even_split(num_layers, num_stages)}
        else:
            yield suggestion


def _num_layers(model: ModelConfig, seq_len: int) -> int:
    return sum(block.is_layer for block in model.block_specs(seq_len))


def _numbers_of_stages(
    mesh: Mesh, model: ModelConfig, pipeline: PipelineConfig
) -> Iterator[Suggestion]:
    """Values that change the number of stages or layers, the present ones first."""
    yield {}
    for chunks in range(pipeline.chunks - 1, 0, -1):
        yield {"pipeline.chunks": chunks}
    yield from smaller_degrees(mesh, pipeline_axis())
    yield from default_schedule(pipeline)
    if "layers" in type(model).model_fields:
        yield {"model.layers": mesh.degree(pipeline_axis()) * pipeline.chunks}


def _even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layer counts of the stages that differ by at most one."""
    count, num_larger = divmod(num_layers, num_stages)
    num_smaller = num_stages - num_larger
    larger = [count + 1] * num_larger
    smaller = [count] * num_smaller
    return (*larger, *smaller)


def default_schedule(pipeline: PipelineConfig) -> Iterator[Suggestion]:
    """The default schedule, with one chunk a rank."""
    if pipeline.schedule == DEFAULT_SCHEDULE:
        return
    suggestion: dict[str, object] = {"pipeline.schedule": DEFAULT_SCHEDULE}
    if pipeline.chunks > 1:
        suggestion["pipeline.chunks"] = 1
    yield suggestion


def schedules(mesh: Mesh, batch: BatchConfig, pipeline: PipelineConfig) -> Iterator[Suggestion]:
    """Numbers of chunks and of micro-batches that the schedule takes, then another schedule."""
    schedule = SCHEDULES.get(pipeline.schedule)
    if schedule is None:
        yield from _sizes_of_file(mesh, batch, pipeline)
        return
    now = pipeline.chunks
    num_ranks = mesh.degree(pipeline_axis())
    for chunks in sorted(schedule.chunks[:MAX_STEPS], key=lambda chunks: abs(chunks - now)):
        other = pipeline.model_copy(update={"chunks": chunks})
        if chunks != now and not any(schedule_takes_sizes(mesh, batch, other)):
            yield {"pipeline.chunks": chunks}
    for size, num_micro in _global_sizes(mesh, batch, range(1, num_ranks + 1)):
        if not schedule.faults(ranks=num_ranks, chunks=now, microbatches=num_micro):
            yield {"batch.global_size": size}
    yield from default_schedule(pipeline)


def _sizes_of_file(
    mesh: Mesh, batch: BatchConfig, pipeline: PipelineConfig
) -> Iterator[Suggestion]:
    """The sizes for which a schedule file holds a table; none for a misspelt name."""
    if not pipeline.table:
        return
    try:
        table = find(pipeline.schedule, pipeline.table).file_table
    except UserError:
        return
    assert table is not None, f"{pipeline.schedule} is no public name"
    size = mesh.degree(sequence_axes()) * batch.micro_size * table.microbatches
    batch_size = {"batch.global_size": size}
    yield batch_size
    for new_mesh in degrees_of_axis(mesh, pipeline_axis(), [table.num_ranks]):
        yield new_mesh
        yield {**new_mesh, **batch_size}


def lengths(
    mesh: Mesh, model: ModelConfig, *, seq_len: int, sequence_parallel: bool
) -> Iterator[Suggestion]:
    """Sequences of another length, or sharded over fewer ranks."""
    unit = length_unit(mesh, sequence_parallel=sequence_parallel)
    for number in range(2):
        for near in nearest_multiples(seq_len, unit, number):
            if near > 0:
                yield {"data.seq_len": near}
    longest: int = getattr(model, "max_seq_len", seq_len + unit)
    yield {"data.seq_len": longest // unit * unit}
    is_given = getattr(model, "from_hf", None)  # a folder says how long its context is
    if hasattr(model, "max_seq_len") and not getattr(model, "rope_scaling", None) and not is_given:
        yield {"model.max_seq_len": seq_len}
    yield from no_sequence_parallelism()
    for axis in position_axes():
        yield from smaller_degrees(mesh, axis)


def no_sequence_parallelism() -> Iterator[Suggestion]:
    """`parallel.sequence` off."""
    yield {"parallel.sequence": False}
