"""The measured costs of a run as text in 80 columns and as JSON: memory by role, traffic by axis, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from weft.config.hardware import Hardware
from weft.core.dimension import pipeline_axis
from weft.core.mesh import WIDTH
from weft.layout.plan import Plan
from weft.planner.measure import RoleCosts
from weft.planner.speeds import TERA, Speeds
from weft.planner.step_time import step_time
from weft.view.quantity import count, short_time
from weft.view.quantity import memory as memory_text

MOST_ROWS = 8
"""Roles that the text lists; of more, the first and last ones and the fullest."""


def costs_text(roles: Sequence[RoleCosts], hardware: Hardware | None) -> str:
    """The costs for a reader."""
    lines = [*_memory_lines(roles), *_fit_lines(roles, hardware), *_traffic_lines(roles)]
    lines.append(_flops_line(roles))
    if hardware is not None:
        lines.extend(time_lines(roles, Speeds(hardware, hardware.efficiency)))
    return "\n".join(line[:WIDTH] for line in lines)


def time_lines(roles: Sequence[RoleCosts], speeds: Speeds) -> list[str]:
    """The predicted step: seconds and their parts, tokens a second, use of the devices."""
    plan = roles[0].step.plan
    time = step_time(roles, speeds)
    num_ranks = plan.mesh.size
    tokens = plan.global_size * plan.seq_len
    tokens_a_second = count(tokens / time.total_s / num_ranks)
    peak = speeds.hardware.bf16_tflops
    hardware_tflops = time.flops / time.total_s / num_ranks / TERA
    model_tflops = model_flops(plan) / time.total_s / num_ranks / TERA
    lines = [
        f"predicted step on {speeds.hardware.label}: {short_time(time.total_s)}",
        f"  pipeline {short_time(time.pipeline_s)} (idle {100 * time.bubble:.0f}%), then reduce"
        f" {short_time(time.reduce_s)}, update {short_time(time.update_s)}",
    ]
    waits = [f"{axis} {short_time(seconds)}" for axis, seconds in time.exposed_s.items()]
    if waits:
        lines.append(f"  waits for collectives, of the rank that waits most: {', '.join(waits)}")
    return [
        *lines,
        f"  {tokens_a_second} tokens/s a device",
        f"  MFU {100 * model_tflops / peak:.0f}% (3 forwards of model FLOPs, of {peak:g} TFLOP/s);"
        f" with recomputation {100 * hardware_tflops / peak:.0f}%",
        f"  shares of the published speeds that work reaches: {speeds.efficiency.source}",
    ]


def model_flops(plan: Plan) -> float:
    """Of a step: a backward takes two forwards; recomputation does not count."""
    return 3 * plan.global_size * sum(stage.flops for stage in plan.stages)


def fullest(roles: Sequence[RoleCosts]) -> RoleCosts:
    """The role with the largest peak."""
    return max(roles, key=lambda role: role.memory.peak)


def _memory_lines(roles: Sequence[RoleCosts]) -> list[str]:
    header = ("rank", "params", "gradients", "optimizer", "in flight", "workspace", "peak", "at")
    rows = [header, *map(_memory_row, _shown(roles))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    lines = ["memory of a rank during a step (tensors; the real code on the meta device):"]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells.extend(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True))
        line = "  " + "  ".join((*cells, row[-1]))
        lines.append(line.rstrip())
    if len(roles) > MOST_ROWS:
        lines.append(f"  (the fullest and others of {len(roles)} roles)")
    lines.extend(_workspace_lines(fullest(roles)))
    return lines


def _memory_row(role: RoleCosts) -> tuple[str, ...]:
    memory = role.memory
    kept = memory.kept
    sizes = (
        kept.params + kept.buffers,
        kept.gradients,
        kept.optimizer,
        memory.in_flight,
        memory.workspace,
        memory.peak,
    )
    return (f"{pipeline_axis()}{role.row}", *map(memory_text, sizes), memory.cause)


def _shown(roles: Sequence[RoleCosts]) -> list[RoleCosts]:
    if len(roles) <= MOST_ROWS:
        return list(roles)
    half = MOST_ROWS // 2
    chosen = {*range(half), *range(len(roles) - half + 1, len(roles)), fullest(roles).row}
    return [roles[index] for index in sorted(chosen)]


def _workspace_lines(role: RoleCosts) -> list[str]:
    parts = [(name, size) for name, size in role.memory.parts.items() if size]
    if not parts:
        return []
    text = ", ".join(f"{memory_text(size)} of {name}" for name, size in parts)
    return [f"  the peak of {pipeline_axis()}{role.row} includes {text}"]


def _fit_lines(roles: Sequence[RoleCosts], hardware: Hardware | None) -> list[str]:
    if hardware is None:
        return []
    free = hardware.memory_bytes - fullest(roles).memory.peak
    size = f"{hardware.label}, {memory_text(hardware.memory_bytes)} a device"
    if free >= 0:
        return [f"  fits {size}: {memory_text(free)} are left"]
    return [f"  does NOT fit {size}: {memory_text(-free)} too much"]


def _traffic_lines(roles: Sequence[RoleCosts]) -> list[str]:
    """The traffic of the rank that sends most."""
    busiest = max(roles, key=_sent_bytes)
    if not busiest.traffic:
        return []
    lines = [f"traffic of a rank in a step (of {pipeline_axis()}{busiest.row}, which sends most):"]
    for (axis, op), total in sorted(busiest.traffic.items()):
        times = count(total.operations)
        lines.append(
            f"  {axis:<10} {op:<15} {times:>7} x, {memory_text(total.sent_bytes):>9} sent"
            f" of {memory_text(total.payload_bytes):>9}"
        )
    return lines


def _sent_bytes(role: RoleCosts) -> int:
    return sum(total.sent_bytes for total in role.traffic.values())


def _flops_line(roles: Sequence[RoleCosts]) -> str:
    most = max(role.flops for role in roles)
    total = sum(role.flops * role.num_ranks for role in roles)
    return f"floating-point operations of a step: {total:.4g}, at most {most:.4g} a rank"


def costs_json(roles: Sequence[RoleCosts], hardware: Hardware | None) -> dict[str, Any]:
    """The costs as JSON: bytes, counts and FLOPs."""
    fields: dict[str, Any] = {"roles": [_role_json(role) for role in roles]}
    if hardware is not None:
        peak = fullest(roles).memory.peak
        fields["hardware"] = {
            "name": hardware.name,
            "memory_bytes": hardware.memory_bytes,
            "left_bytes": hardware.memory_bytes - peak,
        }
        fields["time"] = _time_json(roles, Speeds(hardware, hardware.efficiency))
    return fields


def _time_json(roles: Sequence[RoleCosts], speeds: Speeds) -> dict[str, Any]:
    plan = roles[0].step.plan
    time = step_time(roles, speeds)
    return {
        "step_s": time.total_s,
        "pipeline_s": time.pipeline_s,
        "reduce_s": time.reduce_s,
        "update_s": time.update_s,
        "exposed_s": dict(time.exposed_s),
        "bubble": time.bubble,
        "tokens_per_s": plan.global_size * plan.seq_len / time.total_s,
        "model_flops": model_flops(plan),
        "efficiency": asdict(speeds.efficiency),
    }


def _role_json(role: RoleCosts) -> dict[str, Any]:
    memory = role.memory
    traffic = []
    for (axis, op), total in sorted(role.traffic.items()):
        traffic.append(
            {
                "axis": axis,
                "op": op,
                "operations": total.operations,
                "payload_bytes": total.payload_bytes,
                "sent_bytes": total.sent_bytes,
            }
        )
    kept = memory.kept
    return {
        pipeline_axis(): role.row,
        "ranks": role.num_ranks,
        "params_bytes": kept.params,
        "gradients_bytes": kept.gradients,
        "optimizer_bytes": kept.optimizer,
        "buffers_bytes": kept.buffers,
        "in_flight_bytes": memory.in_flight,
        "workspace_bytes": memory.workspace,
        "workspace_parts": dict(memory.parts),
        "peak_bytes": memory.peak,
        "peak_at": memory.cause,
        "levels": [[level.name, level.held, level.most] for level in memory.levels],
        "flops": role.flops,
        "traffic": traffic,
    }
