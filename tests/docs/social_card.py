"""The picture that other sites show beside a link to the documentation: claim, logo, and the pipeline of four ranks."""

from __future__ import annotations

from pathlib import Path

from weft.schedule.catalog import make_table
from weft.schedule.simulate import UNIT_COSTS, simulate
from weft.view.svg import COLOURS
from weft.view.svg_elements import document_start, element, px, text_element

WIDTH, HEIGHT = 1200, 630
LEFT = 90
ROW_HEIGHT, ROW_GAP, TOP = 34, 8, 420
LOGO = Path(__file__).parents[2] / "docs" / "site" / "logo.svg"
LINES = (
    "Train one model on many devices, and prove",
    "that it is the model one device would have trained.",
)


def social_card() -> str:
    """The document; `weft.report.png_picture` makes the PNG of it."""
    table = make_table("1f1b", ranks=4, microbatches=8)
    timeline = simulate(table, lambda act: UNIT_COSTS[act.kind])
    longest = max(float(span.end) for span in timeline.spans)
    scale = (WIDTH - 2 * LEFT) / longest
    boxes = [
        element(
            "rect",
            x=px(LEFT + float(span.start) * scale),
            y=TOP + span.rank * (ROW_HEIGHT + ROW_GAP),
            width=px(float(span.duration) * scale - 2),
            height=ROW_HEIGHT,
            rx=3,
            fill=COLOURS[span.kind],
        )
        for span in timeline.spans
    ]
    logo = LOGO.read_text(encoding="utf-8").replace(
        'width="64" height="64"', f'x="{LEFT}" y="80" width="110" height="110"'
    )
    words = {"fill": "white", "font_family": "DejaVu Sans, sans-serif"}
    parts = [
        document_start(WIDTH, HEIGHT),
        element("rect", width=WIDTH, height=HEIGHT, fill="#16325c"),
        logo,
        text_element("weft", x=230, y=164, font_size=84, font_weight="bold", **words),
        *(
            text_element(line, x=LEFT, y=270 + 52 * row, font_size=36, **words)
            for row, line in enumerate(LINES)
        ),
        *boxes,
    ]
    return "\n".join([*parts, "</svg>", ""])
