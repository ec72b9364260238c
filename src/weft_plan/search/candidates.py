"""Candidates of a search: every legal layout of a run on a number of devices, and why others are not legal. No torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from weft.config.layout_keys import LayoutKeys
from weft.config.rules.layout import (
    axis_divides,
    batch_divides,
    dimension_faults,
    divisors,
    layers_make_stages,
    schedule_takes_sizes,
    sequence_divides,
    sequence_parallel_has_sequences,
    statistics_are_of_ranks,
)
from weft.config.schema import BatchConfig, ParallelConfig, PipelineConfig
from weft.core.dimension import all_axes, sequence_axes
from weft.core.mesh import Mesh
from weft.errors import Fault
from weft.parallel.cp import AXIS as CP
from weft.parallel.dp import AXIS as DP
from weft.parallel.ep import AXIS as EP
from weft.parallel.fsdp import AXIS as FSDP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.schedule.catalog import DEFAULT_SCHEDULE, SCHEDULES
from weft_plan.search.layout_choice import Layout

Value = TypeVar("Value")

MICRO_SIZES = (1, 2, 4, 8)
"""Sequences a micro-batch that are tried, besides that of the run."""
RECOMPUTES: tuple[str, ...] = ("none", "selective", "full")
"""What the layers of a layout recompute, all the same."""
CHUNKS = (2, 3, 4, 5, 6, 8)
"""Chunks a rank that are tried of schedules that take several."""
MOST_TRIED_DEVICES = 16
"""Numbers of devices on either side that are tried where no layout fills the given one."""
MOST_SHARDED = 3
"""The ZeRO stage that shards most."""
MIN_TOKENS = 4096
"""Tokens of a sequence on a context rank, at least: shorter parts cost more than they spare."""


@dataclass(frozen=True)
class Space:
    """What a search may choose.

    Attributes:
        num_devices: of all sites.
        node: devices in a node, for the order of axes.
        pinned: keys of the run whose values stay.
        sites: the axis of sites with its degree, outside of the axes that are searched.
    """

    num_devices: int
    node: int
    pinned: frozenset[str] = frozenset()
    sites: tuple[tuple[str, int], ...] = ()

    @property
    def num_sites(self) -> int:
        """1 without such an axis."""
        return math.prod(degree for _, degree in self.sites)


@dataclass(frozen=True)
class PipelineChoice:
    """A schedule, its chunks a rank, and the layers of every stage (empty: balanced)."""

    schedule: str
    chunks: int
    split: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayoutGroup:
    """Layouts with one mesh, micro-batch, recomputation and sharding of sequences.

    Attributes:
        base: has these.
        pipelines, zeros: that it is combined with.
    """

    base: Layout
    pipelines: tuple[PipelineChoice, ...]
    zeros: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.pipelines) * len(self.zeros)

    def __iter__(self) -> Iterator[Layout]:
        for pipeline in self.pipelines:
            for zero in self.zeros:
                yield self.layout(pipeline, zero)

    def layout(self, pipeline: PipelineChoice, zero: int) -> Layout:
        """The one with this schedule and ZeRO stage."""
        return replace(
            self.base,
            zero=zero,
            schedule=pipeline.schedule,
            chunks=pipeline.chunks,
            split=pipeline.split,
        )


@dataclass
class Candidates:
    """The legal layouts of a run, in a fixed order.

    Attributes:
        groups: of them.
        illegal: how many combinations were rejected, by reason. One that rejects a whole mesh
            counts once.
    """

    groups: list[LayoutGroup]
    illegal: Counter[str]

    def __len__(self) -> int:
        return sum(map(len, self.groups))


def candidates(keys: LayoutKeys, space: Space) -> Candidates:
    """Every legal layout of a run with these keys; values outside of the space stay."""
    search = _Enumeration(keys, space)
    groups = list(search.groups())
    return Candidates(groups, search.illegal)


class _Enumeration:
    """The loops over what a layout chooses; a fault ends the loop that chose its reason."""

    def __init__(self, keys: LayoutKeys, space: Space) -> None:
        self.keys = keys
        self.space = space
        self.parallel = keys.parallel
        """With a ZeRO stage that every mesh takes, unless one is given: stages are chosen later."""
        if "parallel.zero" not in space.pinned:
            self.parallel = keys.parallel.model_copy(update={"zero": MOST_SHARDED})
        self.illegal: Counter[str] = Counter()
        self._known_pipelines: dict[tuple[int, int], tuple[PipelineChoice, ...]] = {}
        self._known_reasons: dict[tuple[str, int], str | None] = {}

    def groups(self) -> Iterator[LayoutGroup]:
        for degrees in self._degrees():
            for order in self._orders(degrees):
                yield from self._of_mesh(Layout(order))

    def _values(self, key: str, tried: Sequence[Value], now: Value) -> Sequence[Value]:
        """The values of a key that are tried."""
        if key in self.space.pinned:
            return (now,)
        return tried

    def _degrees(self) -> Iterator[dict[str, int]]:
        """Degrees of all axes whose product is the number of devices, and that the model has."""
        axes = list(search_axes())
        if "mesh" in self.space.pinned:
            mesh = self.keys.mesh
            yield {axis: mesh.degree(axis) for axis in all_axes()}
            return
        sites = self.space.sites
        num_inside, rest = divmod(self.space.num_devices, self.space.num_sites)
        if rest:
            self.illegal["mesh: sites have different numbers of devices"] += 1
            return
        for chosen in self._divisible(num_inside, axes):
            inside = tuple((axis, degree) for axis, degree in chosen.items() if degree > 1)
            mesh = Mesh((*sites, *inside))
            if not self._may_have_copies(chosen):
                continue
            faults: list[Fault] = []
            plain = self.parallel.model_copy(update={"context": "ring"})
            for axis in axes:
                faults.extend(dimension_faults(mesh, self.keys.model, plain, mesh_axis=axis))
            if self._rejects(faults):
                continue
            if chosen[CP] > 1 and self.keys.seq_len < MIN_TOKENS * chosen[CP]:
                self.illegal[
                    f"mesh: cp has less than {MIN_TOKENS} tokens of a sequence a rank"
                ] += 1
                continue
            yield chosen

    def _divisible(self, number: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        """Degrees of these axes whose product is the number, and which the model has one by one."""
        axis, *others = axes
        for degree in divisors(number) if others else (number,):
            reason = self._reason_of_degree(axis, degree)
            if reason is not None:
                # of all meshes with this degree at once: for thousands of devices these are many
                self.illegal[reason] += 1
            elif not others:
                yield {axis: degree}
            else:
                for rest in self._divisible(number // degree, others):
                    yield {axis: degree, **rest}

    def _reason_of_degree(self, axis: str, degree: int) -> str | None:
        """Why no mesh with this degree is legal, whatever the others are; None: it may be."""
        key = (axis, degree)
        if key not in self._known_reasons:
            mesh, model = Mesh((key,) if degree > 1 else ()), self.keys.model
            faults = list(axis_divides(mesh, model, axis))
            if axis == PP:
                one_chunk = PipelineConfig()
                faults += layers_make_stages(mesh, model, one_chunk, seq_len=self.keys.seq_len)
            self._known_reasons[key] = reason_of(faults[0]) if faults else None
        return self._known_reasons[key]

    def _may_have_copies(self, degrees: Mapping[str, int]) -> bool:
        """Whether states are sharded over all data ranks, or over those of whole nodes, with copies on
        other nodes: inside of a node the ranks that share states are no nearer than all are.
        """
        if degrees[FSDP] == 1:
            return True
        inside = math.prod(degrees[axis] for axis in (FSDP, EP, CP, TP))
        return degrees[DP] > 1 and inside % self.space.node == 0

    def _rejects(self, faults: Collection[Fault]) -> bool:
        """Count the reason of the first fault; whether there is one."""
        for fault in faults:
            self.illegal[reason_of(fault)] += 1
            return True
        return False

    def _orders(self, degrees: Mapping[str, int]) -> Iterator[tuple[tuple[str, int], ...]]:
        """Orders of the axes that place some group differently on the nodes; the usual one first.

        The tensor axis stays innermost: its collectives are the largest ones. Copies of sharded
        states are outside of their shards, which the axes that share states with them are next to.
        """
        if "mesh" in self.space.pinned:
            yield self.keys.mesh.axes
            return
        wide = [(axis, degree) for axis, degree in degrees.items() if degree > 1]
        inner = [item for item in wide if item[0] == TP]
        outer = [item for item in wide if item[0] != TP]
        placements: set[object] = set()
        for order in itertools.permutations(outer):
            names = [axis for axis, _ in order]
            if FSDP in names and not {EP, CP}.issuperset(names[names.index(FSDP) + 1 :]):
                continue
            axes = (*self.space.sites, *order, *inner)
            placement = placement_of(axes, self.space.node)
            if placement not in placements:
                placements.add(placement)
                yield axes

    def _of_mesh(self, layout: Layout) -> Iterator[LayoutGroup]:
        mesh = Mesh.parse(layout.mesh)
        now = self.keys.parallel.recompute
        recomputes = self._values("parallel.recompute", RECOMPUTES, now)
        zeros = tuple(self._zeros(mesh))
        sequences = list(self._sequences(mesh))
        for micro_size in self._micro_sizes(mesh):
            pipelines = self._pipelines(mesh, micro_size)
            if not pipelines:
                continue
            for (sequence, context), recompute in itertools.product(sequences, recomputes):
                base = replace(
                    layout,
                    micro_size=micro_size,
                    sequence=sequence,
                    context=context,
                    recompute=recompute,
                )
                yield LayoutGroup(base, pipelines, zeros)

    def _micro_sizes(self, mesh: Mesh) -> Iterator[int]:
        batch = self.keys.batch
        sizes = self._values("batch.micro_size", MICRO_SIZES, batch.micro_size)
        for size in sizes:
            tried = batch.model_copy(update={"micro_size": size})
            faults = [
                *batch_divides(mesh, tried),
                *statistics_are_of_ranks(mesh, tried, self.keys.model),
            ]
            if not self._rejects(faults):
                yield size

    def _sequences(self, mesh: Mesh) -> Iterator[tuple[bool, str]]:
        """Sequence parallelism and the method of context parallelism."""
        parallel = self.parallel
        flags: Sequence[bool] = (False, True) if mesh.degree(TP) > 1 else (False,)
        methods: Sequence[str] = (parallel.context,)
        if mesh.degree(CP) > 1:
            methods = ("ring", "allgather", "ulysses")
        for sequence in self._values("parallel.sequence", flags, parallel.sequence):
            for context in self._values("parallel.context", methods, parallel.context):
                tried = parallel.model_copy(update={"sequence": sequence, "context": context})
                if not self._rejects(self._sequence_faults(mesh, tried)):
                    yield sequence, context

    def _sequence_faults(self, mesh: Mesh, parallel: ParallelConfig) -> list[Fault]:
        model = self.keys.model
        faults = list(sequence_divides(mesh, model, parallel, seq_len=self.keys.seq_len))
        faults.extend(sequence_parallel_has_sequences(model, parallel))
        for axis in all_axes():
            faults.extend(dimension_faults(mesh, model, parallel, mesh_axis=axis))
        return faults

    def _zeros(self, mesh: Mesh) -> Sequence[int]:
        has_replicas = any(mesh.degree(axis) > 1 for axis in (DP, CP, EP))
        stages: Sequence[int] = (0, 1, 2, 3) if has_replicas else (0,)
        if mesh.degree(FSDP) > 1:
            stages = (1, 2, 3)
        now = self.keys.parallel.zero
        return self._values("parallel.zero", stages, now)

    def _pipelines(self, mesh: Mesh, micro_size: int) -> tuple[PipelineChoice, ...]:
        if mesh.degree(PP) == 1 and "pipeline.schedule" not in self.space.pinned:
            return (PipelineChoice(DEFAULT_SCHEDULE, 1),)
        num_micro = self.keys.batch.global_size // (mesh.degree(sequence_axes()) * micro_size)
        key = mesh.degree(PP), num_micro
        if key not in self._known_pipelines:
            found = tuple(self._legal_pipelines(mesh, micro_size))
            self._known_pipelines[key] = found
        return self._known_pipelines[key]

    def _legal_pipelines(self, mesh: Mesh, micro_size: int) -> Iterator[PipelineChoice]:
        pipeline = self.keys.pipeline
        names = self._values("pipeline.schedule", tuple(SCHEDULES), pipeline.schedule)
        for name in names:
            for chunks in self._chunks(name):
                tried = pipeline.model_copy(update={"schedule": name, "chunks": chunks})
                if not self._rejects(self._pipeline_faults(mesh, micro_size, tried)):
                    yield PipelineChoice(name, chunks, tried.split)

    def _chunks(self, name: str) -> Sequence[int]:
        pipeline = self.keys.pipeline
        if name not in SCHEDULES:
            return (pipeline.chunks,)
        allowed = SCHEDULES[name].chunks
        tried = [chunks for chunks in (1, *CHUNKS) if chunks in allowed]
        return self._values("pipeline.chunks", tried or [allowed[0]], pipeline.chunks)

    def _pipeline_faults(
        self, mesh: Mesh, micro_size: int, pipeline: PipelineConfig
    ) -> tuple[Fault, ...]:
        batch = BatchConfig(global_size=self.keys.batch.global_size, micro_size=micro_size)
        return (
            *layers_make_stages(mesh, self.keys.model, pipeline, seq_len=self.keys.seq_len),
            *schedule_takes_sizes(mesh, batch, pipeline),
        )


def search_axes() -> tuple[str, ...]:
    """Axes that a search gives degrees: those of one site."""
    return tuple(axis for axis in all_axes() if axis in (PP, DP, FSDP, EP, CP, TP))


def reason_of(fault: Fault) -> str:
    """The reason of a fault without its numbers, by which rejected layouts are counted."""
    what = fault.what
    for digit in "0123456789":
        what = what.replace(digit, "")
    return f"{fault.key}: {' '.join(what.split())}"


def placement_of(axes: Sequence[tuple[str, int]], node: int) -> frozenset[tuple[str, int, int]]:
    """For each axis the ranks of a group, and the nodes that they are on."""
    found = set()
    stride = 1
    for axis, degree in reversed(axes):
        num_nodes = degree if stride >= node else math.ceil(degree * stride / node)
        found.add((axis, degree, num_nodes))
        stride *= degree
    return frozenset(found)


def nearest_devices(keys: LayoutKeys, space: Space) -> tuple[int, ...]:
    """The nearest smaller and the nearest larger number of devices that a layout fills."""
    found = []
    search = _Enumeration(keys, space)
    for step in (-1, 1):
        for distance in range(1, MOST_TRIED_DEVICES + 1):
            number = space.num_devices + step * distance
            if number < 1:
                break
            search.space = replace(space, num_devices=number)  # what it knows of degrees is kept
            if next(search.groups(), None) is not None:
                found.append(number)
                break
    return tuple(found)
