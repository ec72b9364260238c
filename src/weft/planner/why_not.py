"""Why a layout is not the best one: a rule leaves it out, it does not fit, or it is slower; what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.parallel.cp import AXIS as CP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.planner.candidates import MIN_TOKENS
from weft.planner.found_layouts import Found, FoundLayouts
from weft.planner.layout_choice import Layout
from weft.planner.layout_costs import LayoutCosts
from weft.planner.plan_report import Rates, found_lines, reason, wrapped
from weft.view.quantity import memory, short_time


def why_lines(
    named: Layout,
    result: FoundLayouts,
    costs: LayoutCosts,
    capacity: float,
    rates: Rates,
) -> list[str]:
    """What is wrong with a named layout, which is legal."""
    lines = too_large_lines(named, costs, capacity)
    if not lines:
        entry = Found(named, costs.predict(named))
        lines = _measured_lines(
            entry,
            result,
            capacity,
            rates,
        )
    lines.extend(rule_lines(named, costs))
    return [part for line in lines for part in wrapped(line)]


def _measured_lines(
    entry: Found,
    result: FoundLayouts,
    capacity: float,
    rates: Rates,
) -> list[str]:
    named = entry.layout
    lines = [f"why not {named.text}:"]
    lines.extend(f"  {line}" for line in found_lines(entry, rates))
    if entry.peak_bytes > capacity:
        missing = memory(entry.peak_bytes - capacity)
        kept = max(role.memory.kept.total for role in entry.prediction.roles)
        lines.append(f"  it does not fit: {missing} too much")
        lines.append(f"  {memory(kept)} of it are parameters, gradients and optimizer states")
    elif result.best and named == result.best[0].layout:
        lines.append("  it is the best one")
    elif result.best:
        lines.append(f"  the best one has {reason(result.best[0], entry)}")
    return lines


def too_large_lines(
    named: Layout,
    costs: LayoutCosts,
    capacity: float,
) -> list[str]:
    """By how much a named layout does not fit, and what would; [] if it may fit."""
    bound = costs.bound(named, costs.blocks(named))
    if bound.peak_bytes <= capacity:
        return []
    change, size = smaller_change(named, costs, capacity)
    word = "fits" if size <= capacity else "has the least bytes of those tried, and does not fit"
    lines = [
        f"why not {named.text}:",
        f"  it does not fit: it needs at least {memory(bound.peak_bytes)} of {memory(capacity)},"
        f" {memory(bound.state_bytes)} of it between steps and for gradients",
        f"  {change.text} {word}: at least {memory(size)}",
    ]
    return [part for line in lines for part in wrapped(line)]


def rule_lines(named: Layout, costs: LayoutCosts) -> Iterator[str]:
    """The rules by which the search leaves a layout out, and what a layout within them takes."""
    axes = [axis for axis, _ in named.degrees]
    if TP in axes[:-1]:
        degrees = [item for item in named.degrees if item[0] != TP]
        inner = replace(named, degrees=(*degrees, (TP, named.degree(TP))))
        yield (
            f"  not searched: {TP} is not the innermost axis; its collectives are the largest, and"
            f" wait on the slower links between nodes. {_simulated_text(inner, costs)}"
        )
    tokens = costs.run.data.seq_len // named.degree(CP)
    if named.degree(CP) > 1 and tokens < MIN_TOKENS:
        yield (
            f"  not searched: {tokens} tokens of a sequence on a {CP} rank, less than {MIN_TOKENS}:"
            " attention then sends more than it computes; dp or tp takes the ranks"
        )


def _simulated_text(layout: Layout, costs: LayoutCosts) -> str:
    entry = costs.simulate(layout)
    return f"{layout.text} takes {short_time(entry.seconds)} (simulated)"


def smaller_change(
    named: Layout,
    costs: LayoutCosts,
    memory_bytes: float,
) -> tuple[Layout, float]:
    """The layout with the fewest changes of a named one that may fit, and the bytes that it needs
    at least; the one with the least bytes where none fits.

    Tried are higher ZeRO stages, recomputation, sequence parallelism, then twice the pipeline ranks.
    """
    smallest: tuple[Layout, float] | None = None
    for changed in _changes(named):
        if not costs.has_stages(changed):
            continue
        size = costs.bound(changed, costs.blocks(changed)).peak_bytes
        if size <= memory_bytes:
            return changed, size
        if smallest is None or size < smallest[1]:
            smallest = changed, size
    assert smallest is not None, "the named layout is legal"
    return smallest


def _changes(named: Layout) -> Iterator[Layout]:
    """The layout itself, then others with more and more changes."""
    twice = tuple((axis, 2 * degree if axis == PP else degree) for axis, degree in named.degrees)
    flags = (named.sequence, True) if named.degree(TP) > 1 else (named.sequence,)
    for degrees in dict.fromkeys((named.degrees, twice)):
        split = named.split if degrees == named.degrees else ()
        for sequence in dict.fromkeys(flags):
            for recompute in dict.fromkeys((named.recompute, "selective", "full")):
                for zero in range(named.zero, 4):
                    yield replace(
                        named,
                        degrees=degrees,
                        sequence=sequence,
                        recompute=recompute,
                        zero=zero,
                        split=split,
                    )
