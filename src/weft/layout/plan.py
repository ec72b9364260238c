"""The plan: one frozen value that says what every rank does; the trainer executes it, a checkpoint stores it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from weft.core.axes import Rule
from weft.core.dimension import (
    LayoutOptions,
    activation_axes,
    all_axes,
    default_sharding_rule,
    dimensions,
    pipeline_axis,
    position_axes,
    sequence_axes,
)
from weft.core.mesh import Mesh
from weft.core.model_config import BlockSpec
from weft.core.precision import Dtype, dtype_faults
from weft.core.sequence import DEFAULT_CONTEXT, Context, length_unit
from weft.errors import Fault, PlanError, counted
from weft.layout.compilation import Compile, compile_faults
from weft.layout.recomputation import RecomputeMode, RecomputePolicy, layers_of, read_policy
from weft.layout.stages import split_by_cost, split_by_counts
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import DEFAULT_SCHEDULE, find, short_name
from weft.schedule.lower import Program, lower
from weft.schedule.simulate import UNIT_COSTS, simulate
from weft.schedule.table_file import TableLines
from weft.schedule.timeline import bubble

Recompute = Annotated[str, AfterValidator(lambda text: read_policy(text).text)]
"""Text of a `RecomputePolicy`."""

MeshField = Annotated[
    Mesh,
    BeforeValidator(lambda value: Mesh.parse(value) if isinstance(value, str) else value),
    PlainSerializer(lambda mesh: mesh.text, return_type=str),
]


class Stage(BaseModel):
    """Consecutive blocks that one pipeline rank runs as one, and the shape of their output; `parts` as
    of `BlockSpec`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: tuple[str, ...]
    out: tuple[str | int, ...]
    flops: float
    parts: tuple[tuple[str, tuple[str | int, ...]], ...] = ()

    @property
    def tensors(self) -> tuple[tuple[str | int, ...], ...]:
        """Sizes of each tensor that it hands on."""
        return tuple(dims for _, dims in self.parts) or (self.out,)


def _default_rule() -> tuple[tuple[str, str], ...]:
    return tuple(default_sharding_rule().items())


def sharding_rule_of(mesh: Mesh, axis_sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """The rule of a plan for a model of these sizes: without the logical axes that stay whole on this
    mesh.
    """
    rule = default_sharding_rule()
    for dimension in dimensions().values():
        degree = mesh.degree(dimension.name)
        for logical in dimension.whole_if_uneven:
            if axis_sizes.get(logical, degree) % degree:
                del rule[logical]
    return tuple(rule.items())


class Plan(BaseModel):
    """What every rank does. Frozen, hashable, JSON.

    Attributes:
        family: name of the model family.
        architecture: the family's config as canonical JSON.
        schedule: public name, or the path of a schedule file.
        schedule_lines: content of that file; empty for a public name.
        microbatches: micro-batches of one data-parallel rank in a step, each of `micro_size`
            sequences.
        statistics_size: sequences that BatchNorm normalises together; 0: those of a micro-batch.
        tp_overlap: whether parts of the sequence are sent over tp while others are multiplied.
        recompute: what layers recompute, see `weft.layout.recomputation`.
        compile: whether torch.compile compiles blocks; "auto": on GPUs, in layouts that allow it.
        rule: pairs (logical axis of a parameter, mesh axis that shards it), also for axes that this
            mesh does not have.
        chunked_losses: whether heads compute the losses of targets chunk by chunk, not whole logits.
        clip: largest global gradient norm; 0: no clipping.
        bucket_bytes: size of a gradient bucket.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mesh: MeshField
    family: str
    architecture: str
    stages: tuple[Stage, ...]
    schedule: str = DEFAULT_SCHEDULE
    schedule_lines: TableLines = ()
    chunks: int = 1
    microbatches: int = 1
    micro_size: int = 1
    statistics_size: int = 0
    seq_len: int = 1
    sequence_parallel: bool = False
    tp_overlap: bool = False
    context: Context = DEFAULT_CONTEXT
    rule: tuple[tuple[str, str], ...] = Field(default_factory=_default_rule)
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = "none"
    compile: Compile = "off"
    chunked_losses: bool = False
    params: Dtype = "float32"
    compute: Dtype = "float32"
    reduce: Dtype = "float32"
    clip: float = 0.0
    bucket_bytes: int = 25 * 2**20

    @property
    def sharding_rule(self) -> Rule:
        """Logical axis -> mesh axis, for the mesh axes that have more than one rank."""
        rule: dict[str, str] = {
            logical: axis for logical, axis in self.rule if self.mesh.degree(axis) > 1
        }
        return rule

    @property
    def options(self) -> LayoutOptions:
        """What the layout says besides the mesh, as dimensions read it."""
        return LayoutOptions(
            sequence_parallel=self.sequence_parallel,
            tp_overlap=self.tp_overlap,
            context=self.context,
            zero=self.zero,
        )

    @property
    def pipeline_size(self) -> int:
        """Number of pipeline ranks."""
        return self.mesh.degree(pipeline_axis())

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different sequences."""
        return self.mesh.degree(sequence_axes())

    @property
    def global_size(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.micro_size * self.microbatches * self.num_data_ranks

    @property
    def normalised_size(self) -> int:
        """Sequences that BatchNorm normalises together."""
        return self.statistics_size or self.micro_size

    @property
    def statistics_ranks(self) -> int:
        """Neighbouring data ranks whose micro-batches BatchNorm normalises together."""
        return self.normalised_size // self.micro_size

    @property
    def schedule_name(self) -> str:
        """Name of the schedule for readers; of a file the last part of its path."""
        return short_name(self.schedule)

    @cached_property
    def table(self) -> Table:
        """The schedule's table: what each pipeline rank computes, in order."""
        schedule = find(self.schedule, self.schedule_lines)
        return schedule.table(self.pipeline_size, self.chunks, self.microbatches)

    @cached_property
    def program(self) -> Program:
        """The table with its sends and receives."""
        return lower(self.table)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights apart."""
        return any(act.kind == "W" for row in self.table.rows for act in row)

    @property
    def recompute_policy(self) -> RecomputePolicy:
        """What each layer recomputes."""
        return read_policy(self.recompute)

    @property
    def recompute_of(self) -> Mapping[str, RecomputeMode]:
        """Name of a block -> what it recomputes."""
        modes: dict[str, RecomputeMode] = {}
        for number in range(len(self.stages)):
            modes.update(self.stage_modes(number))
        return modes

    def stage_modes(self, stage: int) -> Mapping[str, RecomputeMode]:
        """Name of a block of a stage -> what it recomputes."""
        return self.recompute_policy.of_blocks(stage, self.stages[stage].blocks)

    def with_blocks(self, kept: Sequence[Sequence[str]]) -> Plan:
        """The plan with these blocks of each stage alone; each recomputes what it does in this one."""
        stages = []
        for stage, blocks in zip(self.stages, kept, strict=True):
            stages.append(stage.model_copy(update={"blocks": tuple(blocks)}))
        modes_of = self.recompute_of
        modes = [[modes_of[name] for name in layers_of(blocks)] for blocks in kept]
        recompute = RecomputePolicy.of_modes(modes).text
        return self.model_copy(update={"stages": tuple(stages), "recompute": recompute})

    def compile_faults(self) -> tuple[Fault, ...]:
        """Why the blocks cannot be compiled in this layout; empty where they can."""
        found = compile_faults(
            splits_backward=self.splits_backward,
            schedule=self.schedule_name,
            tp_overlap=self.tp_overlap,
        )
        return tuple(found)

    def compiles_blocks(self, device_type: str) -> bool:
        """Whether blocks are compiled on devices of this type; "auto": on GPUs, and on the meta device
        in their place, where they can be.
        """
        if self.compile == "auto":
            return device_type in ("cuda", "meta") and not self.compile_faults()
        return self.compile == "blocks"

    @property
    def bubble(self) -> float:
        """Idle share of a step with equal stages and a backward of twice the forward; predicted."""
        if self.pipeline_size == 1:
            return 0.0
        return float(bubble(simulate(self.table)))

    def action_units(self, act: Act) -> float:
        """Time of an action by the FLOPs of its stage: 1 unit is the mean forward of a stage."""
        mean_flops = sum(stage.flops for stage in self.stages) / len(self.stages)
        return UNIT_COSTS[act.kind] * self.stages[act.stage].flops / mean_flops

    def boundary_shape(self, stage: int) -> tuple[int, ...]:
        """Shape of what `stage` sends on for one micro-batch, as one rank holds it."""
        shapes = self.part_shapes(stage)
        if shapes:
            return (self.micro_size, sum(math.prod(shape[1:]) for shape in shapes))
        return self._local_shape(self.stages[stage].out)

    def part_shapes(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that `stage` hands on for one micro-batch, where they are several."""
        return tuple(self._local_shape(dims) for _, dims in self.stages[stage].parts)

    def knows_sizes(self, stage: int) -> bool:
        """Whether the shape of what `stage` hands on follows from the length of the sequences."""
        return all("seq" in dims for dims in self.stages[stage].tensors)

    def with_sizes(self, stage: int, shapes: Sequence[tuple[int, ...]]) -> Plan:
        """The plan in which `stage` hands on tensors of these shapes, as one rank holds them."""
        own = self.stages[stage]
        names = [name for name, _ in own.parts]
        update = {"parts": tuple(zip(names, shapes, strict=True))} if names else {"out": shapes[0]}
        changed = own.model_copy(update=update)
        stages = (*self.stages[:stage], changed, *self.stages[stage + 1 :])
        return self.model_copy(update={"stages": stages})

    def _local_shape(self, dims: Sequence[str | int]) -> tuple[int, ...]:
        """The shape of activations on one rank."""
        num_shards = self.mesh.degree(position_axes())
        if self.sequence_parallel:
            num_shards *= self.mesh.degree(activation_axes())
        sizes = {"batch": self.micro_size, "seq": self.seq_len // num_shards}
        return tuple(sizes[entry] if isinstance(entry, str) else entry for entry in dims)

    def check(self) -> None:
        """Reject a plan whose parts do not fit together.

        Raises:
            PlanError: with every fault: the schedule's sizes, the number of stages, blocks named
                twice, lengths that the mesh does not divide.
        """
        faults = tuple(_faults(self))
        if faults:
            raise PlanError(*faults)

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read the text of `to_json`."""
        return Plan.model_validate_json(text)

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON: the plan's name in logs and
        folders.
        """
        text = self.to_json()
        digest = hashlib.sha256(text.encode())
        return digest.hexdigest()[:12]


def make_stages(
    blocks: Sequence[BlockSpec], num_stages: int, *, split: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Split `blocks` into stages: by cost, or by the layer counts of `split`.

    Raises:
        PlanError: more stages than layers, or counts that do not add up.
    """
    names_of_stages = split_by_counts(blocks, split) if split else split_by_cost(blocks, num_stages)
    specs = {block.name: block for block in blocks}
    stages = []
    for names in names_of_stages:
        flops = sum(specs[name].flops for name in names)
        last = specs[names[-1]]
        stages.append(Stage(blocks=names, out=last.out, flops=flops, parts=last.parts))
    return tuple(stages)


def canonical_json(architecture: Mapping[str, Any]) -> str:
    """A family's config fields as canonical JSON."""
    return json.dumps(dict(architecture), sort_keys=True)


def _faults(plan: Plan) -> Iterator[Fault]:
    ranks = plan.pipeline_size
    schedule = find(plan.schedule, plan.schedule_lines)
    yield from schedule.faults(ranks=ranks, chunks=plan.chunks, microbatches=plan.microbatches)
    yield from _stage_faults(plan)
    yield from plan.recompute_policy.faults(len(plan.stages))
    unit = length_unit(plan.mesh, sequence_parallel=plan.sequence_parallel)
    if plan.seq_len % unit:
        what = "does not divide over the ranks that share a sequence"
        yield Fault("seq_len", what, got=str(plan.seq_len), need=f"a multiple of {unit}")
    yield from dtype_faults(params=plan.params, compute=plan.compute, reduce=plan.reduce)
    unknown = [axis for _, axis in plan.rule if axis not in all_axes()]
    if unknown:
        what = f"shards over axes that no mesh has: {', '.join(unknown)}"
        yield Fault("rule", what, need=", ".join(all_axes()))


def _stage_faults(plan: Plan) -> Iterator[Fault]:
    """The stages are as many as the schedule has, none is empty, and each block is in one."""
    num_stages = plan.pipeline_size * plan.chunks
    if len(plan.stages) != num_stages:
        ranks = f"{pipeline_axis()}{plan.pipeline_size}"
        chunks = counted(plan.chunks, "chunk")
        yield Fault(
            "stages",
            "the schedule has another number of stages",
            got=str(len(plan.stages)),
            need=f"{num_stages} = {ranks} x {chunks}",
        )
    counts: Counter[str] = Counter()
    empty: list[str] = []
    for index, stage in enumerate(plan.stages):
        counts.update(stage.blocks)
        if not stage.blocks:
            empty.append(str(index))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        yield Fault(
            "stages",
            f"blocks on more than one stage: {', '.join(repeated)}",
            need="each block once",
        )
    if empty:
        yield Fault(
            "stages", f"stages without blocks: {', '.join(empty)}", need="at least one block each"
        )
