"""Suggested values for configs that fail validation: for each kind of fault candidates, nearest values first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from weft.config.checks import Suggestion, with_values
from weft.config.run import Run
from weft.core.dimension import data_axis, pipeline_axis, position_axes
from weft.core.sequence import length_unit
from weft.schedule.catalog import SCHEDULES

MAX_STEPS = 8
"""Multiples tried on either side of a value."""
MAX_DEGREES = 32
"""Smaller degrees of an axis that are tried one by one."""
DEFAULT_SCHEDULE = "1f1b"
"""The schedule that takes every number of micro-batches."""


def degrees_of_axis(
    run: Run,
    axis: str,
    degrees: Iterable[int],
) -> Iterator[Suggestion]:
    """Other degrees of `axis`, nearest first: with as many ranks, the rest on the data axis, or
    with fewer ranks.
    """
    mesh, data = run.device_mesh, data_axis()
    now = mesh.degree(axis)

    def distance(degree: int) -> tuple[float, int]:
        return abs(math.log(degree / now)), degree

    for degree in sorted(set(degrees), key=distance):
        data_ranks, rest = divmod(mesh.degree(data) * now, degree)
        if degree < now and rest == 0:
            yield {"mesh": _mesh_text(run, {axis: degree, data: data_ranks})}
        yield {"mesh": _mesh_text(run, {axis: degree})}


def smaller_degrees(run: Run, axis: str) -> Iterator[Suggestion]:
    """Fewer ranks along `axis`."""
    now = run.device_mesh.degree(axis)
    nearest = range(max(1, now - MAX_DEGREES), now)
    yield from degrees_of_axis(run, axis, nearest)
    if now > MAX_DEGREES:
        yield from degrees_of_axis(run, axis, [1])


def _mesh_text(run: Run, change: dict[str, int]) -> str:
    """The run's mesh with other degrees; a new data axis stands after the pipeline axis, outside
    all others.
    """
    data, pipeline = data_axis(), pipeline_axis()
    degrees = dict(run.device_mesh.axes)
    names = list(degrees)
    if data not in names:
        place = names.index(pipeline) + 1 if pipeline in names else 0
        names.insert(place, data)
    after = {data: 1, **degrees, **change}
    return " ".join(f"{name}{after[name]}" for name in names if after[name] > 1)


def batch_sizes(run: Run) -> Iterator[Suggestion]:
    """Another number of sequences a step, or a micro-batch."""
    micro_size, global_size = run.batch.micro_size, run.batch.global_size
    yield from _global_sizes(run, range(MAX_STEPS))
    for smaller in range(micro_size, 0, -1):
        if global_size % (run.num_data_ranks * smaller) == 0:
            yield {"batch.micro_size": smaller}
    for doublings in range(1, 24):
        yield {"batch.micro_size": micro_size * 2**doublings}


def _global_sizes(run: Run, steps: Iterable[int]) -> Iterator[Suggestion]:
    """Multiples of a micro-batch on every data rank, so many steps from the present global batch."""
    unit = run.num_data_ranks * run.batch.micro_size
    for number in steps:
        for size in nearest_multiples(run.batch.global_size, unit, number):
            if size > 0:
                yield {"batch.global_size": size}


def nearest_multiples(
    value: int,
    unit: int,
    number: int,
) -> tuple[int, ...]:
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


def stages(run: Run) -> Iterator[Suggestion]:
    """Fewer stages, or layers for all of them; where `pipeline.split` is set, one that adds up."""
    for suggestion in _numbers_of_stages(run):
        split = _even_split(with_values(run, suggestion))
        yield {**suggestion, **split}


def _numbers_of_stages(run: Run) -> Iterator[Suggestion]:
    yield {}
    for chunks in range(run.pipeline.chunks - 1, 0, -1):
        yield {"pipeline.chunks": chunks}
    yield from smaller_degrees(run, pipeline_axis())
    yield from default_schedule(run)
    if "layers" in type(run.model).model_fields:
        yield {"model.layers": run.num_stages}


def _even_split(run: Run) -> Suggestion:
    """Layer counts of the stages that differ by at most one, where `pipeline.split` is set."""
    num_layers = sum(block.is_layer for block in run.model.block_specs(run.data.seq_len))
    num_stages = run.num_stages
    if not run.pipeline.split or num_stages > num_layers:
        return {}
    quotient, remainder = divmod(num_layers, num_stages)
    counts = [quotient + 1 if stage < remainder else quotient for stage in range(num_stages)]
    return {"pipeline.split": tuple(counts)}


def default_schedule(run: Run) -> Iterator[Suggestion]:
    """The default schedule, with one chunk a rank."""
    if run.pipeline.schedule == DEFAULT_SCHEDULE:
        return
    suggestion: dict[str, object] = {"pipeline.schedule": DEFAULT_SCHEDULE}
    if run.pipeline.chunks > 1:
        suggestion["pipeline.chunks"] = 1
    yield suggestion


def schedules(run: Run) -> Iterator[Suggestion]:
    """Numbers of chunks and micro-batches that the schedule takes, then another schedule."""
    schedule = SCHEDULES.get(run.pipeline.schedule)
    if (
        schedule is None
    ):  # a misspelt name, or a table in a file: there is nothing to derive values from
        return
    now = run.pipeline.chunks
    for chunks in sorted(schedule.chunks[:MAX_STEPS], key=lambda chunks: abs(chunks - now)):
        if chunks != now:
            yield {"pipeline.chunks": chunks}
    yield from _global_sizes(run, range(1, run.pipeline_size + 1))
    yield from default_schedule(run)


def lengths(run: Run) -> Iterator[Suggestion]:
    """Sequences of another length, or sharded over fewer ranks."""
    length = run.data.seq_len
    unit = length_unit(run.device_mesh, sequence_parallel=run.parallel.sequence)
    for number in range(2):
        for near in nearest_multiples(length, unit, number):
            if near > 0:
                yield {"data.seq_len": near}
    longest: int = getattr(run.model, "max_seq_len", length + unit)
    yield {"data.seq_len": longest // unit * unit}
    if hasattr(run.model, "max_seq_len"):
        yield {"model.max_seq_len": length}
    yield from no_sequence_parallelism(run)
    for axis in position_axes():
        yield from smaller_degrees(run, axis)


def no_sequence_parallelism(run: Run) -> Iterator[Suggestion]:
    """`parallel.sequence` off."""
    yield {"parallel.sequence": False}
