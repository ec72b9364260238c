"""A plan as text for `weft explain`: mesh, batch, pipeline stages and communication per axis, in 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from weft.core.axes import data_axes, state_axes
from weft.core.dimension import activation_axes, dimensions, pipeline_axis, position_axes
from weft.core.mesh import WIDTH
from weft.core.model_config import SAMPLE_NAMES, InputKind
from weft.errors import counted
from weft.layout.plan import Plan
from weft.layout.recomputation import layers_of

ONCE = "once a step, during the backward of the last micro-batch"
EVERY_MICROBATCH = "during the backward of every micro-batch"

ZERO_TRAFFIC = {
    1: "optimizer states are sharded; gradients reduce-scattered once a step",
    2: "states and gradients are sharded; reduce-scatter every micro-batch",
    3: "states, gradients and parameters are sharded, gathered block by block",
}
"""What is sent in place of an all-reduce of gradients."""


def explain(plan: Plan, *, kind: InputKind = "tokens") -> str:
    """The layout of a plan and the reasons for it; lines that are longer than 80 columns are
    continued, indented.

    Args:
        kind: what the model reads.
    """
    lines = plan.mesh.overview().splitlines()
    lines.extend(_whole_lines(plan))
    lines.extend(_batch_lines(plan, kind))
    lines.extend(_stage_lines(plan))
    lines.extend(_recompute_lines(plan))
    lines.extend(_compile_lines(plan))
    lines.extend(_traffic_lines(plan))
    fitting: list[str] = []
    for line in lines:
        fitting.extend(_wrapped(line))
    return "\n".join(fitting)


def _wrapped(line: str) -> list[str]:
    num_spaces = len(line) - len(line.lstrip())
    indent = " " * (num_spaces + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _whole_lines(plan: Plan) -> Iterator[str]:
    """The logical axes that every rank holds whole, as the mesh does not divide them."""
    sharded = dict(plan.rule)
    for axis, degree in plan.mesh.axes:
        for logical in dimensions()[axis].whole_if_uneven:
            if degree > 1 and logical not in sharded:
                yield f"  {logical}: whole on every rank, as {axis}{degree} does not divide them"


def _batch_lines(plan: Plan, kind: InputKind) -> list[str]:
    name = SAMPLE_NAMES[kind]
    samples = counted(plan.global_size, name)
    if kind == "tokens":
        samples += f" of {plan.seq_len}"
    data_ranks = counted(plan.num_data_ranks, "data rank")
    microbatches = counted(plan.microbatches, "micro-batch", "micro-batches")
    micro_samples = counted(plan.micro_size, name)
    when = EVERY_MICROBATCH if plan.zero > 1 else ONCE
    return [
        f"batch: {samples} a step",
        f"  {data_ranks} x {microbatches} of {micro_samples}",
        f"  gradients are reduced {when}",
    ]


def _stage_lines(plan: Plan) -> list[str]:
    num_stages = len(plan.stages)
    if plan.pipeline_size == 1 and num_stages == 1:
        return ["pipeline: none"]
    stages = counted(num_stages, "stage")
    bubble_percent = 100 * plan.bubble
    total_flops = sum(stage.flops for stage in plan.stages) or 1.0
    lines = [
        f"pipeline: {plan.schedule_name}, {stages}, bubble {bubble_percent:.1f}% (predicted)",
        "  share of the FLOPs by stage (the slowest one decides)",
    ]
    for index, stage in enumerate(plan.stages):
        rank = plan.table.stage_to_rank[index]
        num_blocks = counted(len(stage.blocks), "block")
        percent = 100 * stage.flops / total_flops
        what = f"{_blocks_text(stage.blocks)} ({num_blocks}, {percent:.0f}% of the FLOPs)"
        lines.append(f"  stage {index} on {pipeline_axis()}{rank}: {what}")
    return lines


def _recompute_lines(plan: Plan) -> list[str]:
    """What is recomputed, of all layers or by stage."""
    policy = plan.recompute_policy
    if policy.uniform is not None:
        return [] if policy.uniform == "none" else [f"recomputation: {policy.uniform}"]
    lines = ["recomputation of the first layers of each stage:"]
    for index, stage in enumerate(plan.stages):
        counts = Counter(policy.of_layers(index, len(layers_of(stage.blocks))))
        words = [f"{count} {mode}" for mode, count in counts.items()]
        lines.append(f"  stage {index}: {', '.join(words) or 'no layers'}")
    return lines


def _compile_lines(plan: Plan) -> list[str]:
    """Which blocks are compiled, and what of them is not."""
    if plan.compile == "off" or plan.compile_faults():
        return []
    where = " on GPUs" if plan.compile == "auto" else ""
    lines = [f"torch.compile{where}: the blocks between embedding and head"]
    for axis in plan.mesh.wide_axes:
        if axis in position_axes():
            lines.append(f"  attention along {axis} runs between compiled parts")
        elif axis in activation_axes():
            lines.append(f"  sums along {axis} in their backward are hidden behind nothing")
    return lines


def _blocks_text(blocks: Sequence[str]) -> str:
    """The first and the last of consecutive blocks: `embed ... layer3`."""
    first = blocks[0]
    last = blocks[-1]
    if first == last:
        return first
    return f"{first} ... {last}"


def _traffic_lines(plan: Plan) -> list[str]:
    lines: list[str] = []
    for name, degree in plan.mesh.axes:
        if degree == 1:
            continue
        dimension = dimensions()[name]
        lines.append(f"  {name}{degree}: {dimension.traffic(plan.options)}")
    data = data_axes(plan.mesh)
    if plan.zero and data:
        states = state_axes(plan.mesh, data)
        ranks = " x ".join(states.sharded)
        copies = f", copies along {' x '.join(states.replicated)}" if states.replicated else ""
        lines.append(f"  ZeRO {plan.zero} over {ranks}{copies}: {ZERO_TRAFFIC[plan.zero]}")
    if plan.sequence_parallel and plan.mesh.degree(activation_axes()) > 1:
        axes = " x ".join(activation_axes())
        lines.append(f"  sequence parallel: activations between regions are sharded over {axes}")
    if not lines:
        return ["communication: none (one rank)"]
    return ["communication per axis:", *lines]
