"""The mesh of a run as a picture: a box for each rank, a row for each coordinate of the first axis, with its communication."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.mesh import Mesh
from weft.errors import WeftError
from weft.report.svg_charts import COLOURS
from weft.view.svg_elements import document_start, element, text_element, with_tooltip

CELL_WIDTH, CELL_HEIGHT, GAP = 84, 40, 6
LEFT, TOP = 56, 10
MOST_RANKS = 128
MOST_COLUMNS = 8


def mesh_picture(layout: str) -> str:
    """The picture; "" for one rank, for more than 128, and where the text is no mesh."""
    try:
        mesh = Mesh.parse(layout)
    except WeftError:
        return ""
    if not 1 < mesh.size <= MOST_RANKS:
        return ""
    axis, degree = next((name, degree) for name, degree in mesh.axes if degree > 1)
    rows: list[list[int]] = [[] for _ in range(degree)]
    for rank in range(mesh.size):
        rows[mesh.index(rank, axis)].append(rank)
    lines_of_row = -(-len(rows[0]) // MOST_COLUMNS)
    width = LEFT + min(len(rows[0]), MOST_COLUMNS) * (CELL_WIDTH + GAP)
    height = TOP + degree * (lines_of_row * (CELL_HEIGHT + GAP) + GAP)
    parts = [
        document_start(width, height, font_family="system-ui, sans-serif", font_size=12, role="img")
    ]
    parts.append(element("title", f"the ranks of {mesh.text}"))
    for row, ranks in enumerate(rows):
        top = TOP + row * (lines_of_row * (CELL_HEIGHT + GAP) + GAP)
        label = text_element(f"{axis}{row}", x=4, y=top + CELL_HEIGHT // 2 + 4, **{"class": "ink"})
        parts.extend((label, *_cells(mesh, ranks, axis, top=top, colour=row % len(COLOURS))))
    return "\n".join([*parts, "</svg>"])


def _cells(mesh: Mesh, ranks: list[int], axis: str, *, top: int, colour: int) -> Iterator[str]:
    for index, rank in enumerate(ranks):
        line, column = divmod(index, MOST_COLUMNS)
        x, y = LEFT + column * (CELL_WIDTH + GAP), top + line * (CELL_HEIGHT + GAP)
        others = [
            f"{name}{at}"
            for name, at in mesh.coord(rank).items()
            if name != axis and mesh.degree(name) > 1
        ]
        box = element(
            "rect",
            x=x,
            y=y,
            width=CELL_WIDTH,
            height=CELL_HEIGHT,
            rx=6,
            stroke_width=1.5,
            **{"class": f"s{colour} cell"},
        )
        name = text_element(
            f"rank {rank}", x=x + 8, y=y + 17, font_weight="bold", **{"class": "ink"}
        )
        place = text_element(" ".join(others), x=x + 8, y=y + 32, font_size=11, **{"class": "dim"})
        yield with_tooltip(box + name + place, f"rank {rank}: {mesh.coord_text(rank)}")
