"""Timeline as one HTML file without other files: zoom, pan, and a tooltip for every span (`timeline.html`)."""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from weft.schedule.timeline import COMPUTE, KERNELS, Timeline, lanes_of
from weft.view.svg import COLOURS
from weft.view.text import figures

OTHER_COLOURS = ("#f28b82", "#c58af9", "#fcad70", "#9aa0a6", "#d7aefb", "#a8dab5")
PHASE_COLOUR = "#dadce0"
"""Of what is on the lane of kernels and is no action."""


def html(timeline: Timeline, *, title: str) -> str:
    """The page. Its script reads rows (rank, lane), names, and spans [row, name, colour, start, end]."""
    rows: list[dict[str, object]] = []
    row_of: dict[tuple[int, str], int] = {}
    for rank in range(timeline.num_ranks):
        for lane in lanes_of(timeline, rank):
            row_of[rank, lane] = len(rows)
            rows.append({"rank": rank, "lane": lane, "main": lane == KERNELS})
    colours = _colours(timeline)
    numbers = {kind: number for number, kind in enumerate(colours)}
    names: dict[str, int] = {}
    spans: list[list[float]] = []
    for span in timeline.spans:
        name = names.setdefault(span.name, len(names))
        row = row_of[span.rank, span.lane]
        spans.append([row, name, numbers[span.kind], float(span.start), float(span.end)])
    fields = {
        "unit": timeline.unit,
        "rows": rows,
        "names": list(names),
        "kinds": list(colours),
        "colours": list(colours.values()),
        "spans": spans,
    }
    page = resources.files("weft.view").joinpath("timeline.html").read_text(encoding="utf-8")
    page = page.replace("@TITLE@", escape(title))
    page = page.replace("@FIGURES@", escape(figures(timeline.only(kinds=COMPUTE))))
    return page.replace("@DATA@", json.dumps(fields).replace("<", "\\u003c"))


def _colours(timeline: Timeline) -> dict[str, str]:
    """A colour for each kind of span that occurs."""
    on_kernels = {span.kind for span in timeline.spans if span.lane == KERNELS}
    others = sorted({span.kind for span in timeline.spans} - on_kernels)
    colours = {kind: COLOURS.get(kind, PHASE_COLOUR) for kind in sorted(on_kernels)}
    for number, kind in enumerate(others):
        colours[kind] = OTHER_COLOURS[number % len(OTHER_COLOURS)]
    return colours
