"""A plan as text for `weft explain`: mesh, batch, pipeline stages and communication per axis, in 80 columns."""

from __future__ import annotations

from weft.core.axes import data_axes
from weft.core.dimension import activation_axes, dimensions, pipeline_axis
from weft.core.mesh import WIDTH
from weft.errors import counted
from weft.layout.plan import Plan

ONCE = "once a step, during the backward of the last micro-batch"
EVERY_MICROBATCH = "during the backward of every micro-batch"

ZERO_TRAFFIC = {
    1: "optimizer states are sharded; gradients reduce-scattered once a step",
    2: "states and gradients are sharded; reduce-scatter every micro-batch",
    3: "states, gradients and parameters are sharded, gathered block by block",
}
"""What is sent in place of an all-reduce of gradients."""


def explain(plan: Plan) -> str:
    """The layout of a plan and the reasons for it; lines that are longer than 80 columns are
    clipped.
    """
    text = "\n".join(
        (plan.mesh.overview(), *_batch_lines(plan), *_stage_lines(plan), *_traffic_lines(plan))
    )
    return "\n".join(_clipped(line) for line in text.splitlines())


def _clipped(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _batch_lines(plan: Plan) -> list[str]:
    data_ranks = counted(plan.num_data_ranks, "data rank")
    microbatches = counted(plan.microbatches, "micro-batch", "micro-batches")
    when = EVERY_MICROBATCH if plan.zero > 1 else ONCE
    return [
        f"batch: {counted(plan.global_size, 'sequence')} of {plan.seq_len} a step",
        f"  {data_ranks} x {microbatches} of {counted(plan.micro_size, 'sequence')}",
        f"  gradients are reduced {when}",
    ]


def _stage_lines(plan: Plan) -> list[str]:
    if plan.pipeline_size == 1 and len(plan.stages) == 1:
        return ["pipeline: none"]
    total = sum(stage.flops for stage in plan.stages) or 1.0
    lines = [
        f"pipeline: {plan.schedule_name}, {counted(len(plan.stages), 'stage')}, bubble {100 * plan.bubble:.1f}% (predicted)",
        "  balanced by FLOPs (minimises the slowest stage)",
    ]
    for index, stage in enumerate(plan.stages):
        rank = f"{pipeline_axis()}{plan.table.stage_to_rank[index]}"
        blocks = " ... ".join(dict.fromkeys((stage.blocks[0], stage.blocks[-1])))
        num_blocks = counted(len(stage.blocks), "block")
        share = f"{100 * stage.flops / total:.0f}% of the FLOPs"
        lines.append(f"  stage {index} on {rank}: {blocks} ({num_blocks}, {share})")
    return lines


def _traffic_lines(plan: Plan) -> list[str]:
    lines = []
    for name, degree in plan.mesh.axes:
        if degree > 1:
            lines.append(f"  {name}{degree}: {dimensions()[name].traffic(plan.options)}")
    data = data_axes(plan.mesh)
    if plan.zero and data:
        lines.append(f"  ZeRO {plan.zero} over {' x '.join(data)}: {ZERO_TRAFFIC[plan.zero]}")
    if plan.sequence_parallel:
        axes = " x ".join(activation_axes())
        lines.append(f"  sequence parallel: activations between regions are sharded over {axes}")
    return ["communication per axis:", *lines] if lines else ["communication: none (one rank)"]
