"""The measured costs of a run as text in 80 columns: memory by role, routing, traffic by axis, FLOPs, time, world check."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from weft.config.hardware import Hardware, hardware_table
from weft.core.dimension import pipeline_axis
from weft.core.mesh import WIDTH
from weft.errors import counted
from weft.parallel.ep import AXIS as EP
from weft.planner.measure import RoleCosts
from weft.planner.overlap import Share
from weft.planner.predict import Prediction, predict_measured
from weft.planner.run_costs import RunCosts
from weft.planner.speeds import TERA, Speeds
from weft.planner.world_check import WorldCheck
from weft.view.quantity import count, short_time
from weft.view.quantity import memory as memory_text

MOST_ROWS = 8
"""Roles that the text lists; of more, the first and last ones and the fullest."""


def costs_text(costs: RunCosts) -> str:
    """The costs for a reader."""
    lines = [*_memory_lines(costs.roles), *_fit_lines(costs), *_routing_lines(costs)]
    lines.extend(_traffic_lines(costs.roles))
    lines.append(_flops_line(costs.roles))
    if costs.prediction is not None:
        lines.extend(prediction_lines(costs.prediction))
    lines.extend(check_lines(costs.check))
    return "\n".join(lines)


def time_lines(roles: Sequence[RoleCosts], speeds: Speeds) -> list[str]:
    """The predicted step of a measured run."""
    return prediction_lines(predict_measured(roles, speeds))


def prediction_lines(prediction: Prediction) -> list[str]:
    """The predicted step: seconds and their parts, tokens a second, use of the devices."""
    time = prediction.step
    speeds = prediction.speeds
    num_ranks = prediction.roles[0].step.plan.mesh.size
    peak = speeds.hardware.bf16_tflops
    peak_flops = num_ranks * TERA * peak
    used_percent = 100 * time.flops / time.total_s / peak_flops
    mfu_percent = 100 * prediction.mfu
    tokens_a_second = count(prediction.tokens_per_s / num_ranks)
    low = short_time(prediction.step_s.low)
    high = short_time(prediction.step_s.high)
    pipeline = f"pipeline {short_time(time.pipeline_s)} (idle {100 * time.bubble:.0f}%)"
    after = f"reduce {short_time(time.reduce_s)}, update {short_time(time.update_s)}"
    lines = [
        f"predicted step on {speeds.hardware.label}: {short_time(time.total_s)}",
        f"  expected between {low} and {high}",
        f"  {pipeline}, then {after}",
    ]
    waits = [f"{axis} {short_time(seconds)}" for axis, seconds in time.exposed_s.items()]
    if waits:
        axes = ", ".join(waits)
        lines.append(f"  waits for collectives, of the rank that waits most: {axes}")
    model_flops = f"3 forwards of model FLOPs, of {peak:g} TFLOP/s"
    lines += [
        f"  {tokens_a_second} tokens/s a device",
        f"  MFU {mfu_percent:.0f}% ({model_flops}); with recomputation {used_percent:.0f}%",
        f"  shares of the published speeds that work reaches: {speeds.efficiency.source}",
    ]
    return _wrapped(lines)


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of at most 80 columns; continued ones are indented."""
    wrapped: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped.extend(textwrap.wrap(line, WIDTH, subsequent_indent=indent) or [""])
    return wrapped


def fullest(roles: Sequence[RoleCosts]) -> RoleCosts:
    """The role with the largest peak."""
    return max(roles, key=lambda role: role.memory.peak)


def role_name(role: RoleCosts) -> str:
    """`pp3`."""
    return f"{pipeline_axis()}{role.row}"


MEMORY_COLUMNS = ("rank", "params", "grads", "optim", "in flight", "workspace", "peak", "at")


def _memory_lines(roles: Sequence[RoleCosts]) -> list[str]:
    rows: list[tuple[str, ...]] = [MEMORY_COLUMNS]
    for role in _shown(roles):
        rows.append(_memory_row(role))
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = ["memory of a rank during a step (tensors; the real code on the meta device):"]
    for name, *sizes, action in rows:
        cells = [name.ljust(widths[0])]
        for size, width in zip(sizes, widths[1:-1], strict=True):
            cells.append(size.rjust(width))
        cells.append(action)
        line = "  ".join(cells)
        lines.append(f"  {line}".rstrip())
    if len(roles) > MOST_ROWS:
        lines.append(f"  (the fullest and others of {len(roles)} roles)")
    peak = _peak_line(fullest(roles))
    lines.extend(_wrapped([peak]))
    return lines


def _memory_row(role: RoleCosts) -> tuple[str, ...]:
    """The cells of `MEMORY_COLUMNS`."""
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
    action, _, _ = memory.cause.partition(" ")
    texts = map(memory_text, sizes)
    return (role_name(role), *texts, action)


def _shown(roles: Sequence[RoleCosts]) -> list[RoleCosts]:
    if len(roles) <= MOST_ROWS:
        return list(roles)
    half = MOST_ROWS // 2
    first = range(half)
    last = range(len(roles) - half + 1, len(roles))
    chosen = {*first, *last, fullest(roles).row}
    return [roles[index] for index in sorted(chosen)]


def _peak_line(role: RoleCosts) -> str:
    """The largest peak, its cause, and the known buffers in it."""
    memory = role.memory
    line = f"  largest: {memory_text(memory.peak)} of {role_name(role)}, at {memory.cause}"
    parts: list[str] = []
    for name, size in memory.parts.items():
        if size:
            parts.append(f"{memory_text(size)} of {name}")
    if not parts:
        return line
    included = ", ".join(parts)
    return f"{line}; includes {included}"


def _fit_lines(costs: RunCosts) -> list[str]:
    peak = fullest(costs.roles).memory.peak
    if costs.prediction is None:
        return _wrapped([_known_devices_line(peak)])
    hardware = costs.prediction.speeds.hardware
    free = hardware.memory_bytes - peak
    size = f"{hardware.label}, {memory_text(hardware.memory_bytes)} a device"
    if free >= 0:
        return [f"  fits {size}: {memory_text(free)} are left"]
    return [f"  does NOT fit {size}: {memory_text(-free)} too much"]


def _known_devices_line(peak: int) -> str:
    """Which devices of the table have so much memory."""
    by_memory: list[Hardware] = sorted(
        hardware_table().values(), key=lambda device: device.memory_bytes
    )
    large = [device.name for device in by_memory if device.memory_bytes >= peak]
    largest = by_memory[-1]
    if not large:
        size = memory_text(largest.memory_bytes)
        return f"  does NOT fit any known device: the largest, {largest.name}, has {size}"
    return f"  less than the memory of {', '.join(large)} (--hardware says what is left)"


def _routing_lines(costs: RunCosts) -> list[str]:
    """Memory, traffic and FLOPs of the worst routing beside those of the expected one."""
    if not costs.worst:
        return []
    lines = [
        "routing of tokens to experts: expected is an even load; in the worst case all",
        "  tokens go to the experts of one rank of each ep group (figures of that rank):",
    ]
    for name, roles in (("expected", costs.roles), ("worst", costs.worst)):
        memory = memory_text(fullest(roles).memory.peak)
        sent = memory_text(max(map(routed_bytes, roles)))
        flops = max(role.flops for role in roles)
        lines.append(f"  {name:<8}  peak {memory}, {sent} sent to experts, {flops:.4g} FLOPs")
    if costs.prediction is not None:
        worst = predict_measured(costs.worst, costs.prediction.speeds).step.total_s
        expected = costs.prediction.step.total_s
        lines.append(f"  a step takes {short_time(worst)} instead of {short_time(expected)}")
    return lines


def routed_bytes(role: RoleCosts) -> int:
    """What a rank sends in a step to the experts of other ranks, and back."""
    total = role.traffic.get((EP, "all_to_all"))
    return 0 if total is None else total.sent_bytes


def _traffic_lines(roles: Sequence[RoleCosts]) -> list[str]:
    """The traffic of the rank that sends most, and what it is overlapped with."""
    busiest = max(roles, key=_sent_bytes)
    if not busiest.traffic:
        return []
    lines = [
        f"traffic of a rank in a step (of {role_name(busiest)}, which sends most):",
        f"  {'axis':<9} {'operation':<14} {'times':>6} {'sent':>8} {'payload':>8}  hidden behind",
    ]
    for key, total in sorted(busiest.traffic.items()):
        axis, op = key
        name = f"{_short_axis(axis):<9} {op:<14}"
        times = count(total.operations)
        sent = memory_text(total.sent_bytes)
        payload = memory_text(total.payload_bytes)
        hidden = overlap_text(busiest.overlap[key])
        line = f"  {name} {times:>6} {sent:>8} {payload:>8}  {hidden}"
        lines.extend(textwrap.wrap(line, WIDTH, subsequent_indent=" " * 53))
    return lines


def overlap_text(shares: Mapping[str, Share]) -> str:
    """`backward`, or `backward 63, exposed 2`."""
    if len(shares) == 1:
        return next(iter(shares))
    by_number = sorted(shares, key=lambda name: -shares[name].operations)
    words = [f"{name} {count(shares[name].operations)}" for name in by_number]
    return ", ".join(words)


def _short_axis(axis: str) -> str:
    """`world, stage 1 of 4` -> `world 1/4`."""
    return axis.replace(", stage ", " ").replace(" of ", "/")


def _sent_bytes(role: RoleCosts) -> int:
    return sum(total.sent_bytes for total in role.traffic.values())


def _flops_line(roles: Sequence[RoleCosts]) -> str:
    most = max(role.flops for role in roles)
    total = sum(role.flops * role.num_ranks for role in roles)
    return f"floating-point operations of a step: {total:.4g}, at most {most:.4g} a rank"


def check_lines(check: WorldCheck) -> list[str]:
    """The result of the check of all ranks."""
    played = f"{count(check.num_ranks)} ranks by {count(check.num_recorded)} that were played"
    if check.problems:
        problems = [f"  {line}" for problem in check.problems for line in problem.lines]
        return [f"world check FAILED ({played}):", *_wrapped(problems)]
    return [
        f"world check: {played}",
        f"  {counted(check.num_calls, 'collective call')} agree in operation, dtype, shape, group and order;",
        f"  {counted(check.num_messages, 'message')} between pipeline ranks pair up; no deadlock",
    ]
