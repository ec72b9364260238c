"""Owns what is tried in place of a run that does not fit: for each kind of fault the nearest values first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from weft.config.checks import Suggestion, with_values
from weft.config.run import Run
from weft.core.sequence import length_unit
from weft.schedule.catalog import SCHEDULES

FARTHEST = 8
"""Multiples tried on either side of a value."""


def meshes(run: Run, axis: str, degrees: Iterable[int]) -> Iterator[Suggestion]:
    """Another degree of `axis`: data ranks take over what it gives away, or the mesh has fewer ranks."""
    now, dp = run.device_mesh.degree(axis), run.device_mesh.degree("dp")
    for degree in sorted(set(degrees), key=lambda degree: (abs(math.log(degree / now)), degree)):
        if degree < now and dp * now % degree == 0:
            yield {"mesh": _mesh_text(run, {axis: degree, "dp": dp * now // degree})}
        yield {"mesh": _mesh_text(run, {axis: degree})}


def _mesh_text(run: Run, change: dict[str, int]) -> str:
    """The run's mesh with other degrees; a dp that was not there comes behind pp, in front of what talks more."""
    degrees = dict(run.device_mesh.axes)
    names = list(degrees)
    if "dp" not in names:
        names.insert(names.index("pp") + 1 if "pp" in names else 0, "dp")
    after = {"dp": 1} | degrees | change
    return " ".join(f"{name}{after[name]}" for name in names if after[name] > 1)


def batches(run: Run) -> Iterator[Suggestion]:
    """Another number of sequences a step or a micro-batch."""
    unit, size = run.num_data_ranks * run.batch.micro_size, run.batch.global_size
    for number in range(FARTHEST):
        yield from ({"batch.global_size": near} for near in nearest_multiples(size, unit, number) if near > 0)
    smaller = [each for each in range(run.batch.micro_size, 0, -1) if size % (run.num_data_ranks * each) == 0]
    yield from ({"batch.micro_size": each} for each in smaller)
    yield from ({"batch.micro_size": run.batch.micro_size << shift} for shift in range(1, 24))


def nearest_multiples(value: int, unit: int, number: int) -> tuple[int, ...]:
    """The multiples of `unit` that are `number` further than the nearest on either side, the nearer first.

    >>> around(30, 8, 0), around(32, 8, 1)
    ((32, 24), (24, 40))
    """
    below, above = value // unit - number, -(-value // unit) + number
    return tuple(sorted({below * unit, above * unit}, key=lambda near: (abs(near - value), near)))


def stages(run: Run) -> Iterator[Suggestion]:
    """Fewer stages, or layers for all of them; where the cut is named, one that adds up."""
    for mend in _numbers_of_stages(run):
        yield {**mend, **_even_split(with_values(run, mend))}


def _numbers_of_stages(run: Run) -> Iterator[Suggestion]:
    yield {}
    yield from ({"pipeline.chunks": chunks} for chunks in range(run.pipeline.chunks - 1, 0, -1))
    yield from meshes(run, "pp", range(1, run.device_mesh.degree("pp")))
    yield from one_chunk(run)
    if "layers" in type(run.model).model_fields:
        yield {"model.layers": run.num_stages}


def _even_split(run: Run) -> Suggestion:
    """The layers of every stage, where they have to be named."""
    layers, stages = sum(block.is_layer for block in run.model.block_specs(run.data.seq_len)), run.num_stages
    if not run.pipeline.split or stages > layers:
        return {}
    return {"pipeline.split": tuple((layers + stages - 1 - place) // stages for place in range(stages))}


def one_chunk(run: Run) -> Iterator[Suggestion]:
    """The schedule that takes every number of micro-batches."""
    if run.pipeline.schedule != "1f1b":
        yield {"pipeline.schedule": "1f1b"} | ({"pipeline.chunks": 1} if run.pipeline.chunks > 1 else {})


def schedules(run: Run) -> Iterator[Suggestion]:
    """Chunks that the schedule takes, micro-batches that it takes, another schedule."""
    schedule = SCHEDULES.get(run.pipeline.schedule)
    if schedule is None:  # a slip, or a table in a file: which one was meant is nobody's guess
        return
    near = sorted(schedule.chunks[:FARTHEST], key=lambda chunks: abs(chunks - run.pipeline.chunks))
    yield from ({"pipeline.chunks": chunks} for chunks in near if chunks != run.pipeline.chunks)
    unit, size = run.num_data_ranks * run.batch.micro_size, run.batch.global_size
    for number in range(1, run.device_mesh.degree("pp") + 1):
        yield from ({"batch.global_size": near} for near in nearest_multiples(size, unit, number) if near > 0)
    yield from one_chunk(run)


def lengths(run: Run) -> Iterator[Suggestion]:
    """Sequences of another length, or shared by fewer ranks."""
    unit = length_unit(run.device_mesh, sequence_parallel=run.parallel.sequence)
    most: int = getattr(run.model, "max_seq_len", run.data.seq_len + unit)
    for number in range(2):
        yield from ({"data.seq_len": near} for near in nearest_multiples(run.data.seq_len, unit, number) if near > 0)
    yield {"data.seq_len": most // unit * unit}
    if hasattr(run.model, "max_seq_len"):
        yield {"model.max_seq_len": run.data.seq_len}
    yield from no_sequence_parallelism(run)
    yield from meshes(run, "cp", range(1, run.device_mesh.degree("cp")))


def no_sequence_parallelism(run: Run) -> Iterator[Suggestion]:
    """No sequence parallelism."""
    yield {"parallel.sequence": False}


def contexts(run: Run) -> Iterator[Suggestion]:
    """Another way across cp, or fewer ranks there."""
    yield from ({"parallel.context": way} for way in ("ring", "allgather"))
    yield from meshes(run, "cp", range(1, run.device_mesh.degree("cp")))
