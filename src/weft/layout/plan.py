"""Owns the plan: one frozen value that says what every rank does; the trainer plays it, a checkpoint stores it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from weft.core.axes import EXPERT_RULE, TENSOR_RULE, Rule
from weft.core.mesh import AXIS_MEANING, DATA_AXES, Mesh
from weft.core.model_config import BlockSpec
from weft.core.precision import Dtype, dtype_faults
from weft.core.sequence import Context, length_unit
from weft.errors import Fault, PlanError
from weft.layout.stages import split_by_cost, split_by_counts
from weft.schedule.actions import Table
from weft.schedule.catalog import find
from weft.schedule.simulate import simulate
from weft.schedule.timeline import bubble

Recompute = Literal["none", "selective", "full"]

MeshField = Annotated[
    Mesh,
    BeforeValidator(lambda value: Mesh.parse(value) if isinstance(value, str) else value),
    PlainSerializer(lambda mesh: mesh.text, return_type=str),
]


class Stage(BaseModel):
    """Consecutive blocks that one pipeline rank plays as one, and the shape of what they hand on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: tuple[str, ...]
    out: tuple[str | int, ...]
    flops: float


class Plan(BaseModel):
    """What every rank does. Frozen, hashable, JSON.

    `microbatches` counts the micro-batches that one data-parallel rank plays in a step, each of `micro_size` sequences.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mesh: MeshField
    family: str
    architecture: str
    """The family's config as canonical JSON."""
    stages: tuple[Stage, ...]
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    micro_size: int = 1
    seq_len: int = 1
    sequence_parallel: bool = False
    context: Context = "ring"
    rule: tuple[tuple[str, str], ...] = tuple({**TENSOR_RULE, **EXPERT_RULE}.items())
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = "none"
    params: Dtype = "float32"
    compute: Dtype = "float32"
    reduce: Dtype = "float32"
    clip: float = 0.0
    bucket_bytes: int = 25 * 2**20

    @property
    def sharding_rule(self) -> Rule:
        """Logical axis -> mesh axis, for the axes that this mesh really cuts."""
        return {logical: axis for logical, axis in self.rule if self.mesh.degree(axis) > 1}

    @cached_property
    def table(self) -> Table:
        """The schedule's table: what each pipeline rank computes, in order."""
        return find(self.schedule).table(self.mesh.degree("pp"), self.chunks, self.microbatches)

    def check(self) -> None:
        """Refuse a plan whose parts do not fit together.

        Raises:
            PlanError: with every fault: the schedule's sizes, the number of stages, blocks named twice, lengths that the
                mesh does not divide.
        """
        if faults := tuple(_faults(self)):
            raise PlanError(*faults)

    @property
    def global_size(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.micro_size * self.microbatches * self.mesh.degree(("dp", "ep"))

    def boundary_shape(self, stage: int) -> tuple[int, ...]:
        """Shape of what `stage` hands on for one micro-batch, as one rank holds it."""
        cut = self.mesh.degree("cp") * (self.mesh.degree("tp") if self.sequence_parallel else 1)
        lengths = {"batch": self.micro_size, "seq": self.seq_len // cut}
        return tuple(lengths[entry] if isinstance(entry, str) else entry for entry in self.stages[stage].out)

    @property
    def bubble(self) -> float:
        """Idle share of a step with equal stages and a backward of twice the forward; predicted."""
        return float(bubble(simulate(self.table))) if self.mesh.degree("pp") > 1 else 0.0

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote."""
        return Plan.model_validate_json(text)

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON: the plan's name in logs and folders."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def explain(self) -> str:
        """The layout and why, for people."""
        return "\n".join((self.mesh.overview(), *_explain_batch(self), *_explain_stages(self), *_explain_traffic(self)))


def make_stages(
    blocks: Sequence[BlockSpec], num_stages: int, *, split: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Cut `blocks` into stages: by cost, or by the layer counts of `split`.

    Raises:
        PlanError: more stages than layers, or counts that do not add up.
    """
    names = split_by_counts(blocks, split) if split else split_by_cost(blocks, num_stages)
    specs = {block.name: block for block in blocks}
    return tuple(
        Stage(blocks=stage, out=specs[stage[-1]].out, flops=sum(specs[name].flops for name in stage)) for stage in names
    )


def canonical_json(architecture: Mapping[str, Any]) -> str:
    """A family's config fields as canonical JSON."""
    return json.dumps(dict(architecture), sort_keys=True)


def _explain_batch(plan: Plan) -> list[str]:
    data = plan.mesh.degree(("dp", "ep"))
    return [
        f"batch: {plan.global_size} sequences of {plan.seq_len} a step = {data} data rank{'s' * (data > 1)}"
        f" x {plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)} of {plan.micro_size};"
        f" gradients are reduced {_WHEN[plan.zero > 1]}"
    ]


def _explain_stages(plan: Plan) -> list[str]:
    ranks = plan.mesh.degree("pp")
    home = plan.table.stage_to_rank
    total = sum(stage.flops for stage in plan.stages) or 1.0
    lines = []
    for index, stage in enumerate(plan.stages):
        first, last = stage.blocks[0], stage.blocks[-1]
        share = f"{100 * stage.flops / total:.0f}% of the FLOPs"
        lines.append(f"  stage {index} on pp{home[index]}: {first} … {last} ({len(stage.blocks)} blocks, {share})")
    if ranks == 1 and len(plan.stages) == 1:
        return ["pipeline: none; micro-batches are the one-rank table"]
    why = "cut so that the dearest stage is as cheap as possible"
    return [
        f"pipeline: {plan.schedule}, {len(plan.stages)} stages, {why}; bubble {100 * plan.bubble:.1f}% (predicted)",
        *lines,
    ]


def _faults(plan: Plan) -> Iterator[Fault]:
    ranks, stages = plan.mesh.degree("pp"), plan.mesh.degree("pp") * plan.chunks
    yield from find(plan.schedule).faults(ranks=ranks, chunks=plan.chunks, microbatches=plan.microbatches)
    if len(plan.stages) != stages:
        need = f"{stages} = pp{ranks} x {plan.chunks} chunks"
        yield Fault("stages", "another number of stages than the schedule plays", str(len(plan.stages)), need)
    counts = Counter(name for stage in plan.stages for name in stage.blocks)
    if doubled := [name for name, count in counts.items() if count > 1]:
        yield Fault("stages", f"blocks on more than one stage: {', '.join(doubled)}", need="each block once")
    if empty := [index for index, stage in enumerate(plan.stages) if not stage.blocks]:
        yield Fault("stages", f"stages without blocks: {', '.join(map(str, empty))}", need="at least one block each")
    unit = length_unit(plan.mesh, sequence_parallel=plan.sequence_parallel)
    if plan.seq_len % unit:
        yield Fault("seq_len", "does not divide over the ranks that share a sequence", str(plan.seq_len), f"{unit} x n")
    yield from dtype_faults(params=plan.params, compute=plan.compute, reduce=plan.reduce)
    unknown = [axis for _, axis in plan.rule if axis not in AXIS_MEANING]
    if unknown:
        yield Fault("rule", f"cuts over axes that no mesh has: {', '.join(unknown)}", need=", ".join(AXIS_MEANING))


def _explain_traffic(plan: Plan) -> list[str]:
    lines, traffic = [], {**_TRAFFIC, "cp": _CONTEXT[plan.context]}
    for name, degree in plan.mesh.axes:
        if degree > 1:
            lines.append(f"  {name}{degree}: {AXIS_MEANING[name]}; {traffic[name]}")
    spread = [name for name, degree in plan.mesh.axes if degree > 1 and name in DATA_AXES]
    if plan.zero and spread:
        lines.append(f"  ZeRO {plan.zero} over {' x '.join(spread)}: {_ZERO[plan.zero]}")
    if plan.sequence_parallel:
        lines.append(
            "  sequence parallel: between the tensor-parallel regions each tp rank holds its part of every sequence"
        )
    return ["who talks about what:", *lines] if lines else ["one rank: nothing is sent"]


_TRAFFIC = {
    "pp": "activations forward, their gradients back, between neighbours",
    "dp": "sums of gradients, overlapped with the backward",
    "ep": "tokens to their experts and back",
    "tp": "two reductions a layer and direction, on the critical path: keep it inside a node",
}

_WHEN = ("once, during the backward of the last micro-batch", "during the backward of every micro-batch")

_ZERO = {
    1: "optimizer states are spread; gradients are reduce-scattered and values gathered once a step",
    2: "gradients too are spread; they are reduce-scattered every micro-batch, values gathered once a step",
    3: "parameters too are spread; each block's are gathered before its forward and its backward, its gradients reduce-scattered",
}
"""What travels in place of an all-reduce of gradients."""

_CONTEXT: dict[Context, str] = {
    "ring": "keys and values from rank to rank, while each attends to those in hand",
    "allgather": "keys and values to all ranks at once, forward and again backward",
    "ulysses": "columns for heads before each attention and back behind it",
}
