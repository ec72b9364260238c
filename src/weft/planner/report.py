"""The measured costs of a run as text in 80 columns and as JSON: memory by role, traffic by axis, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.dimension import pipeline_axis
from weft.core.mesh import WIDTH
from weft.planner.hardware import Hardware
from weft.planner.measure import RoleCosts
from weft.view.quantity import count
from weft.view.quantity import memory as memory_text

MOST_ROWS = 8
"""Roles that the text lists; of more, the first and last ones and the fullest."""


def costs_text(roles: Sequence[RoleCosts], hardware: Hardware | None) -> str:
    """The costs for a reader."""
    lines = [*_memory_lines(roles), *_fit_lines(roles, hardware), *_traffic_lines(roles)]
    lines.append(_flops_line(roles))
    return "\n".join(line[:WIDTH] for line in lines)


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
    return fields


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
