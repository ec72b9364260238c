"""Timelines as one HTML file without other files: zoom, pan, and a tooltip for every span (`timeline.html`).

A content security policy names the digests of the scripts, so that nothing in a recorded name could run or be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from weft.schedule.timeline import KERNELS, Span, Timeline, lanes_of
from weft.view.svg import COLOURS, TitledTimeline
from weft.view.text_table import TextTable

OTHER_COLOURS = ("#c58af9", "#fcad70", "#9aa0a6", "#d7aefb", "#a8dab5", "#e8a5c8", "#c9b38c")
NAMES_OF_KINDS = {
    "F": "forward (F)",
    "B": "backward (B)",
    "I": "input gradient (I)",
    "W": "weight gradient (W)",
    "wait": "waits for another rank",
}
PHASE_COLOUR = "#dadce0"
"""Of what is on the lane of kernels and is no action."""
SCRIPT = re.compile(r"<script>(.*)</script>", re.DOTALL)


@dataclass(frozen=True)
class ScriptedPart:
    """A part of a page with scripts of its own.

    Attributes:
        html: its markup.
        css: its style, which that of the page overrides.
        data: JSON that holds no markup, which the scripts read from the element `data`.
        scripts: run in this order.
    """

    html: str
    css: str
    data: str
    scripts: tuple[str, ...]


def html(timeline: Timeline, *, title: str) -> str:
    """The page of one timeline."""
    return stacked_html([TitledTimeline(title, timeline)], title=title)


def stacked_html(
    titled: Sequence[TitledTimeline],
    *,
    title: str,
    sentences: Sequence[str] = (),
    tables: Sequence[TextTable] = (),
    part: ScriptedPart | None = None,
) -> str:
    """The page of timelines below each other on one time scale.

    Args:
        sentences: above the picture; of one timeline alone its figures.
        tables: below the picture.
        part: between picture and tables.
    """
    template = resources.files("weft.view").joinpath("timeline.html")
    page = template.read_text(encoding="utf-8")
    script = SCRIPT.search(page)
    assert script is not None, "the page has a script"
    part = part or ScriptedPart("", "", "", ())
    digests = (
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for each in (script[1], *part.scripts)
    )
    scripts = "".join(f"\n<script>{each}</script>" for each in part.scripts)
    if part.data:
        scripts = f'\n<script id="data" type="application/json">{part.data}</script>{scripts}'
    texts = sentences or [each.figures_text for each in titled]
    data = json.dumps(_fields(titled), separators=(",", ":")).replace("<", "\\u003c")
    values = {
        "@TITLE@": escape(title),
        "@DIGESTS@": " ".join(f"'sha256-{digest}'" for digest in digests),
        "@STYLE@": part.css,
        "@FIGURES@": "".join(f"<p>{escape(text)}</p>" for text in texts),
        "@PART@": part.html,
        "@TABLES@": "\n".join(table.html for table in tables),
        "@DATA@": data,
        "@SCRIPTS@": scripts,
    }
    return re.sub("|".join(values), lambda found: values[found[0]], page)


def _fields(titled: Sequence[TitledTimeline]) -> dict[str, object]:
    """What the script of the page reads: rows, names, and spans [row, name, colour, start, end]."""
    rows: list[dict[str, object]] = []
    names: dict[str, int] = {}
    spans: list[list[float]] = []
    colours = _colours([span for each in titled for span in each.timeline.spans])
    kinds = {kind: number for number, kind in enumerate(colours)}
    for number, each in enumerate(titled):
        row_of: dict[tuple[int, str], int] = {}
        for rank in range(each.timeline.num_ranks):
            for lane in lanes_of(each.timeline, rank):
                row_of[rank, lane] = len(rows)
                is_main = lane == KERNELS
                name = each.rank_name(rank)
                rows.append({"part": number, "rank": name, "lane": lane, "main": is_main})
        spans.extend(
            [
                row_of[span.rank, span.lane],
                names.setdefault(span.name, len(names)),
                kinds[span.kind],
                float(span.start),
                float(span.end),
            ]
            for span in each.timeline.spans
        )
    return {
        "unit": titled[0].timeline.unit,
        "parts": [each.title for each in titled] if len(titled) > 1 else [],
        "rows": rows,
        "names": list(names),
        "kinds": list(kinds),
        "legend": [NAMES_OF_KINDS.get(kind, kind) for kind in kinds],
        "colours": list(colours.values()),
        "spans": spans,
    }


def _colours(spans: Iterable[Span]) -> dict[str, str]:
    """A colour for each kind of span that occurs."""
    on_kernels: set[str] = set()
    on_others: set[str] = set()
    for span in spans:
        if span.lane == KERNELS:
            on_kernels.add(span.kind)
        else:
            on_others.add(span.kind)
    colours = {kind: COLOURS.get(kind, PHASE_COLOUR) for kind in sorted(on_kernels)}
    others = sorted(on_others - on_kernels)
    colours |= {kind: COLOURS[kind] for kind in others if kind in COLOURS}
    for number, kind in enumerate(kind for kind in others if kind not in COLOURS):
        colours[kind] = OTHER_COLOURS[number % len(OTHER_COLOURS)]
    return colours
