"""The result of a search as text in 80 columns and as JSON: the best layouts, why, the front, what was rejected."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.mesh import WIDTH
from weft.view.quantity import count, memory, percent, short_time
from weft_plan.search.found_layouts import DEEP, OPEN, Found, FoundLayouts, pareto_front
from weft_plan.search.layout_costs import Simulated
from weft_plan.search.scaling import ScaledLayout

JOULES_A_KWH = 3.6e6
MOST_REASONS = 12
MOST_FRONT = 10
"""Lines of the Pareto front."""


@dataclass(frozen=True)
class Rates:
    """What a device costs: dollars an hour, and watts; None: not known."""

    price_usd_h: float | None
    power_w: float | None


def search_text(result: FoundLayouts, rates: Rates, *, num_shown: int) -> list[str]:
    """The result for a reader."""
    lines = []
    first = result.headline
    if isinstance(first, Simulated):
        value = value_text(first.seconds, "time")
        size = memory(first.peak_bytes)
        lines.append(f"best, simulated and not measured: {first.layout.text}")
        lines.append(f"   step {value}, memory {size}; the best of those that were measured:")
    shown = result.best[:num_shown]
    for place, found in enumerate(shown, start=1):
        lines.append(f"{place}. {found.layout.text} (measured)")
        lines.extend(f"   {line}" for line in found_lines(found, rates))
    for place, (first, second) in enumerate(itertools.pairwise(shown), start=1):
        lines.append(f"{place} before {place + 1}: {reason(first, second)}")
    lines.extend(front_lines(result))
    lines.extend(ranking_lines(result))
    fitting: list[str] = []
    for line in lines:
        fitting.extend(wrapped(line))
    return fitting


def front_lines(result: FoundLayouts) -> list[str]:
    """The fastest layout for each amount of memory: those that were measured, and simulated ones."""
    entries: list[Found | Simulated] = [*result.best, *result.simulated_front]
    front = pareto_front(entries)
    if len(front) < 2:
        return []
    lines = ["Pareto front of time and memory:"]
    for entry in front[:MOST_FRONT]:
        seconds = short_time(entry.seconds)
        size = memory(entry.peak_bytes)
        source = "measured" if isinstance(entry, Found) else "simulated"
        lines.append(f"  {seconds:<7} {size:>9}  {source:<9}  {entry.layout.text}")
    return lines


def ranking_lines(result: FoundLayouts) -> list[str]:
    """How many candidates were ranked by what, and whether the best one is proven to be."""
    lines = [
        f"{count(result.num_candidates)} legal layouts: {count(result.num_bounded)} bounded with their own"
        f" blocks, {count(result.num_simulated)} of these simulated, {len(result.best)} measured as a"
        " whole and fit. Others:"
    ]
    for text, number in (+result.rejected).most_common(MOST_REASONS):
        lines.append(f"  {count(number):>9}  {text}")
    if result.best:
        error = 100 * result.largest_error
        lines.append(f"simulated steps of the measured layouts differ by at most {error:.1f}%")
    if result.is_out_of_time:
        lines.append("the limit of --seconds ended the search")
    lines.extend(proof_lines(result))
    return lines


def proof_lines(result: FoundLayouts) -> list[str]:
    """Whether the best layout is proven the best, and what is known of the others if it is not."""
    if result.is_proven:
        better = "smaller" if result.target == "memory" else "faster"
        return [f"proven: no layout that was not measured is {better}, by its bound"]
    if result.num_unbounded:
        number = count(result.num_unbounded)
        return [f"not proven: --seconds left {number} layouts without a bound"]
    if result.next_bound is None:
        return []
    bound = value_text(result.next_bound, result.target)
    line = f"not proven: layouts that were not measured need at least {bound}"
    entry = result.next_simulated
    if entry is not None:
        value = entry.peak_bytes if result.target == "memory" else entry.seconds
        line += f"; the best simulated one of these takes {value_text(value, result.target)}"
    return [line]


def value_text(value: float, target: str) -> str:
    """The text of a value of the target: seconds of a step, or bytes."""
    return memory(value) if target == "memory" else short_time(value)


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
        f" {count(tokens)} tokens/s a device, MFU {percent(prediction.mfu)}",
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
    prediction = found.prediction
    num_devices = prediction.roles[0].step.plan.mesh.size
    device_s = num_devices * 1e9 / prediction.tokens_per_s
    usd = None
    if rates.price_usd_h is not None:
        usd = rates.price_usd_h * device_s / 3600
    kwh = None
    if rates.power_w is not None:
        kwh = rates.power_w * device_s / JOULES_A_KWH
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
        more = "less" if size < 0 else "more"
        parts.append(f"{memory(abs(size))} {more} memory")
    return ", ".join(parts) or "no difference of note"


def _busy_s(found: Found) -> float:
    """Seconds that a pipeline rank computes, the mean over ranks."""
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
        if size > capacity:
            num_ranks = math.prod(degree for _, degree in layout.degrees)
            num_devices = math.ceil(num_ranks * size / capacity)
            lines.append(f"about {num_devices} devices would hold the states")
    return [part for line in lines for part in wrapped(line)]


def search_json(result: FoundLayouts, rates: Rates, *, num_shown: int) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "candidates": result.num_candidates,
        "best": [found_json(found, rates) for found in result.best[:num_shown]],
        "front": [found_json(found, rates) for found in result.front],
        "rejected": dict(result.rejected),
        "target": result.target,
        "next_bound": result.next_bound,
        "simulated_front": [simulated_json(entry) for entry in result.simulated_front],
        "largest_error": result.largest_error,
        "looked_at": result.share_looked_at,
        "headline": headline_json(result.headline),
        "bounded": result.num_bounded,
        "simulated": result.num_simulated,
        "out_of_time": result.is_out_of_time,
        "proven": result.is_proven,
    }


def headline_json(entry: Found | Simulated) -> dict[str, Any]:
    """The best layout as JSON, and whether it was measured."""
    is_measured = isinstance(entry, Found)
    return {"layout": entry.layout.text, "step_s": entry.seconds, "measured": is_measured}


def simulated_json(entry: Simulated) -> dict[str, Any]:
    """A layout that was simulated, as JSON."""
    return {
        "layout": entry.layout.text,
        "values": entry.layout.values,
        "step_s": entry.seconds,
        "peak_bytes": entry.peak_bytes,
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
        "simulated_s": None if found.simulated is None else found.simulated.seconds,
        "peak_bytes": found.peak_bytes,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "bubble": step.bubble,
        "exposed_s": dict(step.exposed_s),
        "reduce_s": step.reduce_s,
        "update_s": step.update_s,
        **costs_of(found, rates),
    }


def scaling_text(title: str, rows: Sequence[ScaledLayout], rates: Rates) -> list[str]:
    """A table of the best layouts on several numbers of devices, with their efficiency."""
    lines = [
        title,
        f"{'devices':>9}  {'step':>8}  {'tokens/s a device':>17}  {'efficiency':>10}  {'10^9 tokens':>11}"
        "  layout",
    ]
    base: float | None = None
    for row in rows:
        if row.best is None:
            lines.append(f"{row.num_devices:>9}  no legal layout fits")
            continue
        a_device = row.tokens_per_s / row.num_devices
        base = base or a_device
        usd = costs_of(row.best, rates)["usd_a_billion_tokens"]
        price = "" if usd is None else f"${usd:,.0f}"
        lines.append(
            f"{row.num_devices:>9}  {short_time(row.best.seconds):>8}  {count(a_device):>17}"
            f"  {100 * a_device / base:>9.0f}%  {price:>11}  {row.best.layout.mesh}"[:WIDTH]
        )
    return lines


def cheapest(rows: Sequence[ScaledLayout]) -> ScaledLayout | None:
    """The number of devices that spends the fewest device seconds on a token; None if none fits."""
    fitting = [row for row in rows if row.best is not None]
    return min(fitting, key=lambda row: row.num_devices / row.tokens_per_s, default=None)


def scaling_json(rows: Sequence[ScaledLayout], rates: Rates) -> list[dict[str, Any]]:
    """The best layouts on several numbers of devices as JSON."""
    found = []
    for row in rows:
        best = None if row.best is None else found_json(row.best, rates)
        found.append({"devices": row.num_devices, "global_size": row.global_size, "best": best})
    return found
