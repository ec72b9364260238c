"""Compared and searched schedules as text in 80 columns and as JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from weft.core.mesh import WIDTH
from weft.schedule.timeline import Timeline
from weft.view.quantity import memory
from weft.view.text import wrapped
from weft_plan.schedule_search.compare import ScheduleFigures
from weft_plan.schedule_search.table_search import PLACEMENTS, SearchResult, fits

MAX_LABEL = 14
MAX_BY_RANK = 19
MAX_RANKS_SHOWN = 4
HEADER = f"{'schedule':<{MAX_LABEL}} chunks  bubble  makespan    held {'by rank':<{MAX_BY_RANK}} messages"
BYTES_HEADER = f"{'schedule':<{MAX_LABEL}} activations in flight   peak of a rank   messages"


@dataclass(frozen=True)
class ScheduleBytes:
    """What a run takes with a schedule, measured from its code on the meta device.

    Attributes:
        in_flight: at the peak of the fullest rank, activations, messages and workspace.
        peak: of the fullest rank, with parameters, gradients and optimizer.
        messages: sent between the stages of one pipeline in a step.
    """

    in_flight: int
    peak: int
    messages: int


def comparison_lines(
    compared: Sequence[ScheduleFigures], sizes: Sequence[ScheduleBytes] = ()
) -> list[str]:
    """One line a schedule; with the bytes of a run a second table."""
    first = compared[0]
    lines = [
        f"{first.table.num_ranks} ranks, {first.table.microbatches} micro-batches; times of a rank's"
        " share of the model:",
        *wrapped(first.costs.text, WIDTH),
        HEADER,
        *map(_figures_line, compared),
        "held: most micro-batches in flight on a rank; a chunk counts its share",
    ]
    if sizes:
        lines += ["", BYTES_HEADER]
        for figures, size in zip(compared, sizes, strict=True):
            cells = f"{memory(size.in_flight):>21} {memory(size.peak):>16}"
            lines.append(f"{_label(figures)} {cells} {memory(size.messages):>10}")
    return lines


def search_lines(result: SearchResult) -> list[str]:
    """What was found, what is proven, and the built-in schedules beside it."""
    best = result.best
    length = float(best.makespan)
    lines = [
        f"best table: {length:g} units, bubble {_percent(best.bubble)}, found by: {result.origin}"
    ]
    for placement in result.placements:
        found = float(placement.figures.makespan)
        bound = float(placement.bound)
        where = PLACEMENTS[placement.chunks]
        lines.append(f"  {where}: {found:g} found, none below {bound:g} exists")
        if placement.note:
            lines.append(f"    {placement.note}")
    if result.is_optimal:
        lines.append("proven: no table of these placements is shorter")
    else:
        lines.append(f"not proven optimal: at most {_percent(result.gap)} longer than the shortest")
    lines += ["", f"memory limit: {_limits(result)}"]
    lines += comparison_lines([best, *_within(result)])
    above = [figures for figures in result.built_in if not fits(figures, result.request.limits)]
    if above:
        lines.append("above the limit:")
        lines += map(_figures_line, above)
    return lines


def comparison_fields(
    compared: Sequence[ScheduleFigures], sizes: Sequence[ScheduleBytes] = ()
) -> dict[str, Any]:
    """The comparison as JSON values; times in units of the costs."""
    first = compared[0]
    schedules = [figures_fields(figures) for figures in compared]
    for fields, size in zip(schedules, sizes, strict=False):
        fields["activation_bytes"] = size.in_flight
        fields["peak_bytes"] = size.peak
        fields["message_bytes"] = size.messages
    return {
        "ranks": first.table.num_ranks,
        "microbatches": first.table.microbatches,
        "costs": first.costs.text,
        "schedules": schedules,
    }


def search_fields(result: SearchResult) -> dict[str, Any]:
    """The result of a search as JSON values."""
    placements = [
        {
            "chunks": placement.chunks,
            "makespan": float(placement.figures.makespan),
            "bound": float(placement.bound),
            "found_by": placement.origin,
            "note": placement.note,
        }
        for placement in result.placements
    ]
    return {
        **comparison_fields([result.best, *result.built_in]),
        "memory_limit": [float(limit) for limit in result.request.limits],
        "best": figures_fields(result.best),
        "found_by": result.origin,
        "bound": float(result.bound),
        "is_optimal": result.is_optimal,
        "placements": placements,
    }


def figures_fields(figures: ScheduleFigures) -> dict[str, Any]:
    """One schedule as JSON values; `table` is read back by `weft schedule`."""
    return {
        "name": figures.label,
        "chunks": figures.chunks,
        "makespan": float(figures.makespan),
        "bubble": float(figures.bubble),
        "peak_activations": [float(held) for held in figures.held],
        "messages": figures.num_messages,
        "table": json.loads(figures.table.to_json()),
        "timeline": timeline_fields(figures.timeline),
    }


def timeline_fields(timeline: Timeline) -> Any:
    """A timeline as JSON values."""
    return json.loads(timeline.to_json())


def file_comment(result: SearchResult) -> str:
    """The first lines of the file of a found table."""
    best = result.best
    proof = "proven to be the shortest" if result.is_optimal else "not proven to be the shortest"
    return (
        f"{FOUND} {result.origin}\n"
        f"# {float(best.makespan):g} units ({proof}), {best.costs.text}\n"
        f"# memory limit: {_limits(result)}\n"
    )


FOUND = "# found by weft schedule --search:"
"""How the file of a found table begins."""


def _within(result: SearchResult) -> Iterable[ScheduleFigures]:
    for figures in result.built_in:
        if fits(figures, result.request.limits) and figures is not result.best:
            yield figures


def _figures_line(figures: ScheduleFigures) -> str:
    held = [f"{float(number):.3g}" for number in figures.held]
    most = f"{float(max(figures.held)):.3g}"
    cells = [
        _label(figures),
        f"{figures.chunks:>6}",
        f"{_percent(figures.bubble):>7}",
        f"{float(figures.makespan):>9.5g}",
        f"{most:>7}",
        f"{_by_rank(held):<{MAX_BY_RANK}}",
        f"{figures.num_messages:>8}",
    ]
    return " ".join(cells)


def _label(figures: ScheduleFigures) -> str:
    label = figures.label
    if len(label) > MAX_LABEL:
        label = label[: MAX_LABEL - 1] + "…"
    return f"{label:<{MAX_LABEL}}"


def _limits(result: SearchResult) -> str:
    limits = [f"{float(limit):g}" for limit in result.request.limits]
    if len(set(limits)) == 1:
        return f"{limits[0]} micro-batches a rank"
    return f"{', '.join(limits)} micro-batches, by rank"


def _by_rank(words: Sequence[str]) -> str:
    if len(set(words)) == 1:
        return "all"
    if len(words) > MAX_RANKS_SHOWN:
        return " ".join([*words[:2], "...", words[-1]])
    return " ".join(words)


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.1f}%"
