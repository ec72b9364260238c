"""Expert load as a heat map: a row for each block with experts, a column for each measured step, as static SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.errors import printable
from weft.report.recorded_values import RunRecord
from weft.report.run_history import Event, number
from weft.view.quantity import count
from weft.view.svg_elements import document_start, element, px, text_element, with_tooltip

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 64, 14, 26, 26
ROW_PX = 18
MOST_COLUMNS, MOST_ROWS = 80, 64
FIELD = "expert_load"


def expert_heat_map(run: RunRecord) -> str:
    """The picture of a run; "" where no loads are recorded. Of more steps than there are columns, a
    column shows the largest load of several.
    """
    events = [event for event in run.blocks if isinstance(event.get(FIELD), dict)]
    names = list(dict.fromkeys(name for event in events for name in event[FIELD]))[:MOST_ROWS]
    if not names:
        return ""
    size = math.ceil(len(events) / MOST_COLUMNS)
    columns = [events[start : start + size] for start in range(0, len(events), size)]
    table = [[_largest(column, name) for column in columns] for name in names]
    most = max(max(row) for row in table)
    height = TOP + ROW_PX * len(names) + BOTTOM
    cell = (WIDTH - LEFT - RIGHT) / len(columns)
    parts = [
        document_start(
            WIDTH, height, font_family="system-ui, sans-serif", font_size=12, role="img"
        ),
        element("title", "Expert load by block and step"),
        text_element(
            f"1 (balanced) to {most:.3g}",
            x=WIDTH - RIGHT,
            y=16,
            text_anchor="end",
            **{"class": "dim"},
        ),
    ]
    for row, (name, values) in enumerate(zip(map(printable, names), table, strict=True)):
        y = TOP + row * ROW_PX
        parts.append(
            text_element(name[:9], x=LEFT - 7, y=y + 13, text_anchor="end", **{"class": "dim"})
        )
        for at, value in enumerate(values):
            opacity = 0.06 + 0.94 * (value - 1) / ((most - 1) or 1.0)
            box = element(
                "rect",
                x=px(LEFT + at * cell),
                y=y,
                width=px(cell),
                height=ROW_PX - 2,
                fill_opacity=f"{min(max(opacity, 0.0), 1.0):.3f}",
                **{"class": "f1"},
            )
            step = count(int(number(columns[at][-1].get("step"))))
            parts.append(with_tooltip(box, f"{name}, step {step}: {value:.3g}"))
    for at in dict.fromkeys((0, len(columns) - 1)):
        step = count(int(number(columns[at][-1].get("step"))))
        anchor = "start" if at == 0 else "end"
        x = LEFT if at == 0 else WIDTH - RIGHT
        parts.append(text_element(step, x=x, y=height - 8, text_anchor=anchor, **{"class": "dim"}))
    return "\n".join([*parts, "</svg>"])


def _largest(events: Sequence[Event], name: str) -> float:
    """The largest load of a block in these measurements; 1 where it has none."""
    values = [number(event[FIELD].get(name)) for event in events]
    finite = [value for value in values if math.isfinite(value)]
    return max(finite, default=1.0)
