"""The measured costs of a run as text in 80 columns: memory by role, routing, traffic by axis, FLOPs, time, world check."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from weft.comm.observe import Traffic
from weft.config.hardware import hardware_table
from weft.core.dimension import pipeline_axis
from weft.core.mesh import WIDTH
from weft.errors import counted
from weft.parallel.ep import AXIS as EP
from weft.planner.measure.overlap import Share
from weft.planner.measure.roles import RoleCosts, step_copied
from weft.planner.run_costs import RunCosts
from weft.planner.simulate.predict import Prediction, predict_measured
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import StepTime
from weft.planner.world.world_check import WorldCheck
from weft.view.quantity import count, percent, short_time
from weft.view.quantity import memory as memory_text

MOST_ROWS = 8
"""Roles that the text lists; of more, the first and last ones and the fullest."""


def costs_text(costs: RunCosts) -> str:
    """The costs for a reader."""
    lines = [
        *_memory_lines(costs.roles),
        *_fit_lines(costs),
        *_wrapped(_offload_lines(costs)),
        *_routing_lines(costs),
        *_traffic_lines(costs.roles),
        _flops_line(costs.roles),
        *_wrapped(_kernel_lines(costs.roles)),
    ]
    if costs.prediction is not None:
        lines.extend(prediction_lines(costs.prediction))
    if costs.order is not None and costs.order.note:
        lines.extend(_wrapped([f"  {costs.order.note}"]))
    lines.extend(check_lines(costs.check))
    return "\n".join(lines)


def time_lines(roles: Sequence[RoleCosts], speeds: Speeds) -> list[str]:
    """The predicted step of a measured run."""
    return prediction_lines(predict_measured(roles, speeds))


def _offload_lines(costs: RunCosts) -> Iterator[str]:
    """Activations on the host, what is copied, and how fast the link must be to hide that."""
    role = max(costs.roles, key=lambda role: role.memory.host)
    if not role.memory.host:
        return
    copied = step_copied(role.step, role.row)
    yield (
        f"offload: {memory_text(role.memory.host)} of host memory for activations of {role_name(role)}, "
        f"{memory_text(copied)} a step out and back"
    )
    if costs.prediction is not None:
        forward_s = costs.prediction.step.forward_s
        yield (
            f"  hidden behind the forward at {copied / forward_s / 1e9:.0f} GB/s to the host or more; slower below "
            "(PCIe x16, published: 32 of generation 4, 64 of 5)"
        )


def _kernel_lines(roles: Sequence[RoleCosts]) -> Iterator[str]:
    """The kernels of attention over whole sequences and of products of experts, and why they are chosen."""
    attention = dict.fromkeys(choice for role in roles for choice in role.step.attention)
    experts = dict.fromkeys(choice for role in roles for choice in role.step.experts)
    for name, choices in (("attention", attention), ("experts", experts)):
        if choices:
            yield f"{name}: {', '.join(choices)}"


def prediction_lines(prediction: Prediction) -> list[str]:
    """The predicted step: seconds and their parts, tokens a second, use of the devices."""
    speeds = prediction.speeds
    step_s = short_time(prediction.step.total_s)
    low = short_time(prediction.step_s.low)
    high = short_time(prediction.step_s.high)
    lines = [
        f"predicted step on {speeds.hardware.label}: {step_s}",
        f"  expected between {low} and {high}",
        *_step_parts(prediction.step),
        *_use_of_devices(prediction),
        f"  shares of the published speeds that work reaches: {speeds.efficiency.source}",
    ]
    compute = prediction.roles[0].step.plan.compute
    note = speeds.hardware.slow_compute_note(compute)
    if note:
        lines.append(f"  {note}")
    return _wrapped(lines)


def _step_parts(step: StepTime) -> list[str]:
    """Seconds of the pipeline, of what follows it, and of waits by axis."""
    pipeline = short_time(step.pipeline_s)
    idle_percent = 100 * step.bubble
    reduce = short_time(step.reduce_s)
    update = short_time(step.update_s)
    after = f"reduce {reduce}, update {update}"
    lines = [f"  pipeline {pipeline} (idle {idle_percent:.0f}%), then {after}"]
    waits = []
    for axis, seconds in step.exposed_s.items():
        waits.append(f"{axis} {short_time(seconds)}")
    if waits:
        axes = ", ".join(waits)
        lines.append(f"  waits for collectives, of the rank that waits most: {axes}")
    return lines


def _use_of_devices(prediction: Prediction) -> list[str]:
    """Tokens a second, and floating-point operations as a share of the published ones."""
    step = prediction.step
    num_ranks = prediction.roles[0].step.plan.mesh.size
    tokens = count(prediction.tokens_per_s / num_ranks)
    utilization = prediction.utilization
    mfu = percent(prediction.mfu)
    used = percent(replace(utilization, flops=step.flops).mfu(step.total_s))
    recomputed = "" if used == mfu else f"; with recomputation {used}"
    return [f"  {tokens} tokens/s a device", f"  MFU {mfu} ({utilization.text}){recomputed}"]


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of at most 80 columns; continued ones are indented."""
    result: list[str] = []
    for line in lines:
        num_spaces = len(line) - len(line.lstrip())
        indent = " " * (num_spaces + 2)
        parts = textwrap.wrap(line, WIDTH, subsequent_indent=indent)
        result.extend(parts or [""])
    return result


def fullest(roles: Sequence[RoleCosts]) -> RoleCosts:
    """The role with the largest peak."""
    return max(roles, key=lambda role: role.memory.peak)


def role_name(role: RoleCosts) -> str:
    """`pp3`."""
    return f"{pipeline_axis()}{role.row}"


MEMORY_COLUMNS: tuple[str, ...] = (
    "rank",
    "params",
    "grads",
    "optim",
    "in flight",
    "workspace",
    "peak",
    "at",
)


def _memory_lines(roles: Sequence[RoleCosts]) -> list[str]:
    """The table of memory, and the largest peak."""
    rows = [MEMORY_COLUMNS]
    rows.extend(_memory_row(role) for role in _shown(roles))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["memory of a rank during a step (tensors; the real code on the meta device):"]
    lines.extend(_memory_line(row, widths) for row in rows)
    if len(roles) > MOST_ROWS:
        lines.append(f"  (the fullest and others of {len(roles)} roles)")
    peak = _peak_line(fullest(roles))
    lines.extend(_wrapped([peak]))
    return lines


def _memory_line(row: tuple[str, ...], widths: Sequence[int]) -> str:
    """A row of the table: the name at the left, sizes at the right of their columns."""
    name, *sizes, action = row
    cells = [name.ljust(widths[0])]
    for size, width in zip(sizes, widths[1:-1], strict=True):
        cells.append(size.rjust(width))
    cells.append(action)
    line = "  ".join(cells)
    return f"  {line}".rstrip()


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
    """The roles that the table lists, see `MOST_ROWS`."""
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
    """Whether the fullest rank fits the device, or which devices it would fit."""
    peak = fullest(costs.roles).memory.peak
    if costs.prediction is None:
        line = _known_devices_line(peak)
        return _wrapped([line])
    hardware = costs.prediction.speeds.hardware
    capacity = memory_text(hardware.memory_bytes)
    size = f"{hardware.label}, {capacity} a device"
    free = hardware.memory_bytes - peak
    if free >= 0:
        return [f"  fits {size}: {memory_text(free)} are left"]
    return [f"  does NOT fit {size}: {memory_text(-free)} too much"]


def _known_devices_line(peak: int) -> str:
    """Which devices of the table have so much memory."""
    devices = hardware_table().values()
    by_memory = sorted(devices, key=lambda device: device.memory_bytes)
    large = [device.name for device in by_memory if device.memory_bytes >= peak]
    if not large:
        largest = by_memory[-1]
        size = memory_text(largest.memory_bytes)
        return f"  does NOT fit any known device: the largest, {largest.name}, has {size}"
    names = ", ".join(large)
    return f"  less than the memory of {names} (--hardware says what is left)"


def _routing_lines(costs: RunCosts) -> list[str]:
    """Memory, traffic and FLOPs of the worst routing beside those of the expected one."""
    if not costs.worst:
        return []
    lines = [
        "routing of tokens to experts: expected is an even load; in the worst case all",
        "  tokens go to the experts of one rank of each ep group (figures of that rank):",
        _routing_line("expected", costs.roles),
        _routing_line("worst", costs.worst),
    ]
    if costs.prediction is not None:
        worst = predict_measured(costs.worst, costs.prediction.speeds)
        worst_s = short_time(worst.step.total_s)
        expected_s = short_time(costs.prediction.step.total_s)
        lines.append(f"  a step takes {worst_s} instead of {expected_s}")
    return lines


def _routing_line(name: str, roles: Sequence[RoleCosts]) -> str:
    peak = memory_text(fullest(roles).memory.peak)
    most_sent = max(routed_bytes(role) for role in roles)
    sent = memory_text(most_sent)
    flops = max(role.flops for role in roles)
    return f"  {name:<8}  peak {peak}, {sent} sent to experts, {flops:.4g} FLOPs"


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
        hidden = overlap_text(busiest.overlap[key])
        line = f"  {name} {_traffic_cells(total)}  {hidden}"
        lines.extend(textwrap.wrap(line, WIDTH, subsequent_indent=" " * 53))
    return lines


def _traffic_cells(total: Traffic) -> str:
    """Number of operations, bytes sent and payload, at the right of their columns."""
    times = count(total.operations)
    sent = memory_text(total.sent_bytes)
    payload = memory_text(total.payload_bytes)
    return f"{times:>6} {sent:>8} {payload:>8}"


def overlap_text(shares: Mapping[str, Share]) -> str:
    """`backward`, or `backward 63, exposed 2`."""
    if len(shares) == 1:
        return next(iter(shares))
    by_number = sorted(shares.items(), key=lambda item: -item[1].operations)
    words = []
    for name, share in by_number:
        words.append(f"{name} {count(share.operations)}")
    return ", ".join(words)


def _short_axis(axis: str) -> str:
    """`world, stage 1 of 4` -> `world 1/4`."""
    return axis.replace(", stage ", " ").replace(" of ", "/")


def _sent_bytes(role: RoleCosts) -> int:
    return sum(total.sent_bytes for total in role.traffic.values())


def _flops_line(roles: Sequence[RoleCosts]) -> str:
    most = 0
    total = 0
    for role in roles:
        most = max(most, role.flops)
        total += role.flops * role.num_ranks
    return f"floating-point operations of a step: {total:.4g}, at most {most:.4g} a rank"


def check_lines(check: WorldCheck) -> list[str]:
    """The result of the check of all ranks."""
    played = f"{count(check.num_ranks)} ranks by {count(check.num_recorded)} that were played"
    if check.problems:
        problems: list[str] = []
        for problem in check.problems:
            problems.extend(f"  {line}" for line in problem.lines)
        return [f"world check FAILED ({played}):", *_wrapped(problems)]
    return [
        f"world check: {played}",
        f"  {counted(check.num_calls, 'collective call')} agree in operation, dtype, shape, group and order;",
        f"  {counted(check.num_messages, 'message')} between pipeline ranks pair up; no deadlock",
    ]
