"""Timeline as one HTML file without other files: zoom, pan, and a tooltip for every span (`timeline.html`)."""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from weft.schedule.timeline import COMPUTE, KERNELS, Timeline, lanes_of
from weft.view.svg import COLOURS
from weft.view.text import figures

OTHER_COLOURS = ("#f28b82", "#c58af9", "#fcad70", "#9aa0a6", "#d7aefb", "#a8dab5")
NAMES_OF_KINDS = {
    "F": "forward (F)",
    "B": "backward (B)",
    "I": "input gradient (I)",
    "W": "weight gradient (W)",
}
PHASE_COLOUR = "#dadce0"
"""Of what is on the lane of kernels and is no action."""


def html(timeline: Timeline, *, title: str) -> str:
    """The page. Its script reads rows (rank, lane), names, and spans [row, name, colour, start, end]."""
    template = resources.files("weft.view").joinpath("timeline.html")
    page = template.read_text(encoding="utf-8")
    actions = timeline.only(kinds=COMPUTE)
    footer = figures(actions)
    data = json.dumps(_fields(timeline))
    page = page.replace("@TITLE@", escape(title))
    page = page.replace("@FIGURES@", escape(footer))
    escaped_data = data.replace("<", "\\u003c")
    return page.replace("@DATA@", escaped_data)


def _fields(timeline: Timeline) -> dict[str, object]:
    """What the script of the page reads."""
    rows: list[dict[str, object]] = []
    row_of: dict[tuple[int, str], int] = {}
    for rank in range(timeline.num_ranks):
        for lane in lanes_of(timeline, rank):
            row_of[rank, lane] = len(rows)
            row = {"rank": rank, "lane": lane, "main": lane == KERNELS}
            rows.append(row)
    colours = _colours(timeline)
    kinds = list(colours)
    names: dict[str, int] = {}
    spans: list[list[float]] = []
    for span in timeline.spans:
        numbers = [
            row_of[span.rank, span.lane],
            names.setdefault(span.name, len(names)),
            kinds.index(span.kind),
            float(span.start),
            float(span.end),
        ]
        spans.append(numbers)
    return {
        "unit": timeline.unit,
        "rows": rows,
        "names": list(names),
        "kinds": kinds,
        "legend": [NAMES_OF_KINDS.get(kind, kind) for kind in kinds],
        "colours": list(colours.values()),
        "spans": spans,
    }


def _colours(timeline: Timeline) -> dict[str, str]:
    """A colour for each kind of span that occurs."""
    on_kernels: set[str] = set()
    on_others: set[str] = set()
    for span in timeline.spans:
        if span.lane == KERNELS:
            on_kernels.add(span.kind)
        else:
            on_others.add(span.kind)
    colours = {}
    for kind in sorted(on_kernels):
        colours[kind] = COLOURS.get(kind, PHASE_COLOUR)
    for number, kind in enumerate(sorted(on_others - on_kernels)):
        colours[kind] = OTHER_COLOURS[number % len(OTHER_COLOURS)]
    return colours
