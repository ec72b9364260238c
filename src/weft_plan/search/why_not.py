"""Why a layout is not the best one: a rule leaves it out, it does not fit, or it is slower; what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.parallel.cp import AXIS as CP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.view.quantity import memory, short_time
from weft_plan.search.candidates import MIN_TOKENS
from weft_plan.search.found_layouts import Found, FoundLayouts
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_costs import LayoutCosts
from weft_plan.search.plan_report import Rates, found_lines, reason, wrapped


def why_lines(
    named: Layout, result: FoundLayouts, costs: LayoutCosts, capacity: float, rates: Rates
) -> list[str]:
    """What is wrong with a named layout, which is legal."""
    lines = too_large_lines(named, costs, capacity)
    if not lines:
        entry = Found(named, costs.predict(named))
        lines = _measured_lines(entry, result, capacity, rates)
    lines.extend(rule_lines(named, costs))
    return _all_wrapped(lines)


def _all_wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of at most 80 columns."""
    result: list[str] = []
    for line in lines:
        result.extend(wrapped(line))
    return result


def _measured_lines(entry: Found, result: FoundLayouts, capacity: float, rates: Rates) -> list[str]:
    """What a layout takes, and what is wrong with it."""
    lines = [f"why not {entry.layout.text}:"]
    lines.extend(f"  {line}" for line in found_lines(entry, rates))
    if entry.peak_bytes > capacity:
        missing = memory(entry.peak_bytes - capacity)
        most_kept = max(role.memory.kept.total for role in entry.prediction.roles)
        kept = memory(most_kept)
        lines.append(f"  it does not fit: {missing} too much")
        lines.append(f"  {kept} of it are parameters, gradients and optimizer states")
    elif result.best:
        best = result.best[0]
        if best.layout == entry.layout:
            lines.append("  it is the best one")
        else:
            lines.append(f"  the best one has {reason(best, entry)}")
    return lines


def too_large_lines(named: Layout, costs: LayoutCosts, capacity: float) -> list[str]:
    """By how much a named layout does not fit, and what would; [] if it may fit."""
    bound = costs.bound(named, costs.blocks(named))
    if bound.peak_bytes <= capacity:
        return []
    smaller = smaller_change(named, costs, capacity)
    word = "has the least bytes of those tried, and does not fit"
    if smaller.num_bytes <= capacity:
        word = "fits"
    needed = memory(bound.peak_bytes)
    states = memory(bound.state_bytes)
    lines = [
        f"why not {named.text}:",
        f"  it does not fit: it needs at least {needed} of {memory(capacity)},"
        f" {states} of it between steps and for gradients",
        f"  {smaller.layout.text} {word}: at least {memory(smaller.num_bytes)}",
    ]
    return _all_wrapped(lines)


def rule_lines(named: Layout, costs: LayoutCosts) -> Iterator[str]:
    """The rules by which the search leaves a layout out, and what a layout within them takes."""
    axes = [axis for axis, _ in named.degrees]
    if TP in axes[:-1]:
        others = [item for item in named.degrees if item[0] != TP]
        tp = (TP, named.degree(TP))
        inner = costs.simulate(replace(named, degrees=(*others, tp)))
        seconds = short_time(inner.seconds)
        yield (
            f"  not searched: {TP} is not the innermost axis; its collectives are the largest, and"
            " wait on the slower links between nodes."
            f" {inner.layout.text} takes {seconds} (simulated)"
        )
    num_context = named.degree(CP)
    tokens = costs.seq_len // num_context
    if num_context > 1 and tokens < MIN_TOKENS:
        yield (
            f"  not searched: {tokens} tokens of a sequence on a {CP} rank, less than {MIN_TOKENS}:"
            " attention then sends more than it computes; dp or tp takes the ranks"
        )


@dataclass(frozen=True)
class SmallerLayout:
    """A changed layout, and the bytes that a rank needs at least."""

    layout: Layout
    num_bytes: float


def smaller_change(named: Layout, costs: LayoutCosts, memory_bytes: float) -> SmallerLayout:
    """The layout with the fewest changes of a named one that may fit; the one with the least bytes
    where none fits.

    Tried are higher ZeRO stages, recomputation, sequence parallelism, then twice the pipeline ranks.
    """
    tried: list[SmallerLayout] = []
    for changed in _changes(named):
        if not costs.has_stages(changed):
            continue
        bound = costs.bound(changed, costs.blocks(changed))
        entry = SmallerLayout(changed, bound.peak_bytes)
        if entry.num_bytes <= memory_bytes:
            return entry
        tried.append(entry)
    assert tried, "the named layout is legal"
    return min(tried, key=lambda entry: entry.num_bytes)


def _changes(named: Layout) -> Iterator[Layout]:
    """The layout itself, then others with more and more changes."""
    for layout in dict.fromkeys((named, _with_twice_the_stages(named))):
        flags = [named.sequence]
        if named.degree(TP) > 1:
            flags.append(True)
        for sequence in dict.fromkeys(flags):
            for recompute in dict.fromkeys((named.recompute, "selective", "full")):
                for zero in range(named.zero, 4):
                    yield replace(layout, sequence=sequence, recompute=recompute, zero=zero)


def _with_twice_the_stages(named: Layout) -> Layout:
    """The layout with twice the pipeline ranks, where it has some."""
    if named.degree(PP) == 1:
        return named
    degrees = []
    for axis, degree in named.degrees:
        num_ranks = 2 * degree if axis == PP else degree
        degrees.append((axis, num_ranks))
    return replace(named, degrees=tuple(degrees), split=())
