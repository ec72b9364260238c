"""The result of a search as text in 80 columns and as JSON: the best layouts, why, the front, what was rejected."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.checks import as_flags
from weft.core.mesh import WIDTH
from weft.planner.candidates import Layout
from weft.planner.search import DEEP, OPEN, Found, FoundLayouts
from weft.view.quantity import count, memory, short_time

JOULES_A_KWH = 3.6e6
MOST_REASONS = 12


@dataclass(frozen=True)
class Rates:
    """What a device costs: dollars an hour, and watts; None: not known."""

    price_usd_h: float | None
    power_w: float | None


def flags_of(layout: Layout) -> str:
    """The layout as flags of a command."""
    values = {key: value for key, value in layout.values.items() if value != ()}
    return as_flags(values)


def search_text(result: FoundLayouts, rates: Rates, *, num_shown: int) -> list[str]:
    """The result for a reader."""
    lines = []
    shown = result.best[:num_shown]
    for place, found in enumerate(shown, start=1):
        lines.append(f"{place}. {found.layout.text}")
        lines.extend(f"   {line}" for line in found_lines(found, rates))
    for place, (first, second) in enumerate(itertools.pairwise(shown), start=1):
        lines.append(f"{place} before {place + 1}: {reason(first, second)}")
    if len(result.front) > 1:
        lines.append("Pareto front of time and memory (of the layouts that were measured):")
        for found in result.front:
            size = memory(found.peak_bytes)
            lines.append(f"  {short_time(found.seconds):>8}  {size:>9}  {found.layout.text}")
    lines.extend(ranking_lines(result))
    return [part for line in lines for part in wrapped(line)]


def ranking_lines(result: FoundLayouts) -> list[str]:
    """How many candidates were ranked by what, and whether the best one is proven to be."""
    lines = [
        f"{count(result.num_candidates)} legal layouts: {count(result.num_bounded)} bounded with their own"
        f" blocks, {count(result.num_simulated)} of these simulated, {len(result.best)} measured as a"
        " whole and fit. Others:"
    ]
    for text, number in (+result.rejected).most_common(MOST_REASONS):
        lines.append(f"  {count(number):>9}  {text}")
    if result.is_out_of_time:
        lines.append("the limit of --seconds ended the search")
    if result.is_proven:
        lines.append("proven: no layout that was not measured is faster, other ZeRO stages aside")
    elif result.next_bound_s is not None:
        bound = short_time(result.next_bound_s)
        lines.append(
            f"not proven: layouts that were not measured take at least {bound}; of those that"
            " were simulated the fastest were measured first"
        )
    return lines


def wrapped(line: str) -> list[str]:
    """A line in 80 columns."""
    indent = len(line) - len(line.lstrip())
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * (indent + 2)) or [""]


def found_lines(found: Found, rates: Rates) -> list[str]:
    """Time, memory, use and price of a layout."""
    prediction = found.prediction
    step = prediction.step
    interval = prediction.step_s
    plan = prediction.roles[0].step.plan
    capacity = prediction.speeds.hardware.memory_bytes
    tokens = prediction.tokens_per_s / plan.mesh.size
    lines = [
        f"step {short_time(found.seconds)} ({short_time(interval.low)} to {short_time(interval.high)}),"
        f" {count(tokens)} tokens/s a device, MFU {100 * prediction.mfu:.0f}%",
        f"memory {memory(found.peak_bytes)} of {memory(capacity)}; bubble {100 * step.bubble:.0f}%;"
        f" waits for collectives {exposed_text(step.exposed_s)}; reduce {short_time(step.reduce_s)},"
        f" update {short_time(step.update_s)}",
    ]
    price = price_text(found, rates)
    return [*lines, price] if price else lines


def exposed_text(exposed_s: Mapping[str, float]) -> str:
    """Waits by axis."""
    parts = [f"{axis} {short_time(seconds)}" for axis, seconds in exposed_s.items()]
    return ", ".join(parts) or "none"


def price_text(found: Found, rates: Rates) -> str:
    """Price and energy of 10^9 tokens; "" where neither is known."""
    costs = costs_of(found, rates)
    parts = []
    if costs["usd_a_billion_tokens"] is not None:
        parts.append(f"${costs['usd_a_billion_tokens']:,.0f}")
    if costs["kwh_a_billion_tokens"] is not None:
        parts.append(f"{costs['kwh_a_billion_tokens']:,.0f} kWh")
    return f"10^9 tokens: {', '.join(parts)}" if parts else ""


def costs_of(found: Found, rates: Rates) -> dict[str, float | None]:
    """Dollars and kWh of 10^9 tokens."""
    plan = found.prediction.roles[0].step.plan
    device_s = plan.mesh.size * 1e9 / found.prediction.tokens_per_s
    usd = None if rates.price_usd_h is None else rates.price_usd_h * device_s / 3600
    kwh = None if rates.power_w is None else rates.power_w * device_s / JOULES_A_KWH
    return {"usd_a_billion_tokens": usd, "kwh_a_billion_tokens": kwh}


def reason(first: Found, second: Found) -> str:
    """Why the first is better than the second: the parts of the step and the memory that differ."""
    parts = []
    a, b = first.prediction.step, second.prediction.step
    differences = {
        "computing": _busy_s(first) - _busy_s(second),
        "bubble": a.bubble * a.pipeline_s - b.bubble * b.pipeline_s,
        "waits for collectives": sum(a.exposed_s.values()) - sum(b.exposed_s.values()),
        "reduce": a.reduce_s - b.reduce_s,
        "update": a.update_s - b.update_s,
    }
    threshold = 0.001 * second.seconds
    for name, seconds in sorted(differences.items(), key=lambda item: item[1]):
        if abs(seconds) > threshold:
            more = "less" if seconds < 0 else "more"
            parts.append(f"{short_time(abs(seconds))} {more} {name}")
    size = first.peak_bytes - second.peak_bytes
    if abs(size) > 0.01 * second.peak_bytes:
        parts.append(f"{memory(abs(size))} {'less' if size < 0 else 'more'} memory")
    return ", ".join(parts) or "no difference of note; fewer options"


def _busy_s(found: Found) -> float:
    """Seconds that a pipeline rank computes on average."""
    step = found.prediction.step
    busy = step.pipeline_s * (1 - step.bubble)
    return busy - sum(step.exposed_s.values())


def nothing_fits_text(result: FoundLayouts, capacity: float) -> list[str]:
    """What is known where no layout fits."""
    all_layouts = f"{count(result.num_candidates)} legal layouts"
    num_open = result.rejected[OPEN] + result.rejected[DEEP]
    lines = [f"none of {all_layouts} fits {memory(capacity)} a device"]
    if num_open:
        lines = [
            f"none of the layouts that were measured fits {memory(capacity)} a device;"
            f" {count(num_open)} of {all_layouts} were not: increase --seconds or --measured"
        ]
    if result.smallest is not None:
        size, layout = result.smallest
        lines.append(f"the states alone need at least {memory(size)}, with {layout.text}")
    return [part for line in lines for part in wrapped(line)]


def search_json(result: FoundLayouts, rates: Rates, *, num_shown: int) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "candidates": result.num_candidates,
        "best": [found_json(found, rates) for found in result.best[:num_shown]],
        "front": [found_json(found, rates) for found in result.front],
        "rejected": dict(result.rejected),
        "next_bound_s": result.next_bound_s,
        "bounded": result.num_bounded,
        "simulated": result.num_simulated,
        "out_of_time": result.is_out_of_time,
        "proven": result.is_proven,
    }


def found_json(found: Found, rates: Rates) -> dict[str, Any]:
    """A layout and its prediction as JSON."""
    prediction = found.prediction
    step = prediction.step
    interval = prediction.step_s
    return {
        "layout": found.layout.text,
        "values": found.layout.values,
        "step_s": [interval.low, interval.mid, interval.high],
        "peak_bytes": found.peak_bytes,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "bubble": step.bubble,
        "exposed_s": dict(step.exposed_s),
        "reduce_s": step.reduce_s,
        "update_s": step.update_s,
        **costs_of(found, rates),
    }


def scaling_text(title: str, rows: Sequence[tuple[int, Found | None]]) -> list[str]:
    """A table of the best layouts on several numbers of devices, with their efficiency."""
    lines = [
        title,
        f"{'devices':>9}  {'step':>8}  {'tokens/s a device':>17}  {'efficiency':>10}  layout",
    ]
    base: float | None = None
    for num_devices, found in rows:
        if found is None:
            lines.append(f"{num_devices:>9}  no legal layout fits")
            continue
        a_device = found.prediction.tokens_per_s / num_devices
        base = base or a_device
        lines.append(
            f"{num_devices:>9}  {short_time(found.seconds):>8}  {count(a_device):>17}"
            f"  {100 * a_device / base:>9.0f}%  {found.layout.text}"[:WIDTH]
        )
    return lines
