"""The picture in README: the ranks of pp2 dp2 tp2 as a grid, beside the pipeline that they execute.

PYTHONPATH=. python -m tests.docs.layout_picture      writes docs/pictures/layout.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.core.mesh import Mesh
from weft.schedule.catalog import make_table
from weft.schedule.simulate import UNIT_COSTS, simulate
from weft.view.svg import svg
from weft.view.svg_elements import document_start, element, text_element

PAGE = Path(__file__).parents[2] / "docs" / "pictures" / "layout.svg"
MESH = Mesh.parse("pp2 dp2 tp2")
MICRO_BATCHES = 4
WIDTH, HEIGHT = 1240, 260
CELL_WIDTH, CELL_HEIGHT, GAP = 106, 66, 6
LEFT, TOP = 74, 62
STAGE_GAP = 26
PIPELINE_LEFT = 560
COLOURS = (("#8ab4f8", "#c6dafc"), ("#81c995", "#ceead6"))
"""Of the stages; the second colour is that of their second data rank."""
LAYERS = ("embedding, layers 0 and 1", "layers 2 and 3, head, loss")


def grid() -> Iterator[str]:
    """A cell for each rank: rows are pipeline stages, columns data ranks and, inside, tensor ranks."""
    num_stages, num_data, num_tensor = (degree for _, degree in MESH.axes)
    for data in range(num_data):
        x = LEFT + data * (num_tensor * (CELL_WIDTH + GAP) + STAGE_GAP)
        title = f"dp {data}: half {data + 1} of the batch"
        yield text_element(title, x=x, y=TOP - 30, font_weight="bold")
        for tensor in range(num_tensor):
            yield text_element(f"tp {tensor}", x=x + tensor * (CELL_WIDTH + GAP), y=TOP - 10)
        for stage in range(num_stages):
            y = TOP + stage * (CELL_HEIGHT + STAGE_GAP)
            for tensor in range(num_tensor):
                rank = MESH.rank(pp=stage, dp=data, tp=tensor)
                yield from cell(rank, x + tensor * (CELL_WIDTH + GAP), y, COLOURS[stage][data])
    for stage in range(num_stages):
        y = TOP + stage * (CELL_HEIGHT + STAGE_GAP)
        yield text_element(f"pp {stage}", x=8, y=y + CELL_HEIGHT // 2 + 4, font_weight="bold")
        yield text_element(LAYERS[stage], x=LEFT, y=y + CELL_HEIGHT + 16, fill="#5f6368")


def cell(rank: int, x: int, y: int, fill: str) -> Iterator[str]:
    """The box of a rank with what it holds."""
    yield element("rect", x=x, y=y, width=CELL_WIDTH, height=CELL_HEIGHT, fill=fill, rx=4)
    heads = "heads 0, 1" if rank % 2 == 0 else "heads 2, 3"
    yield text_element(f"rank {rank}", x=x + 8, y=y + 24, font_weight="bold")
    yield text_element(heads, x=x + 8, y=y + 46)


def pipeline() -> str:
    """What the two stages execute, as `weft schedule 1f1b --ranks 2 --microbatches 4` draws it."""
    table = make_table("1f1b", ranks=2, microbatches=MICRO_BATCHES)
    timeline = simulate(table, lambda act: UNIT_COSTS[act.kind])
    title = "a step, 1F1B: forward of micro-batch 0 to 3, backward B0 to B3"
    drawn = svg(timeline, title=title)
    width = WIDTH - PIPELINE_LEFT
    drawn = drawn.replace(">rank ", ">pp ")
    return drawn.replace("<svg ", f'<svg x="{PIPELINE_LEFT}" y="44" ', 1).replace(
        'width="960" height="142"', f'width="{width}" height="{width * 142 // 960}"', 1
    )


def picture() -> str:
    """The document."""
    parts = [
        document_start(WIDTH, HEIGHT, font_family="monospace", font_size=13),
        element("rect", width=WIDTH, height=HEIGHT, fill="white"),
        *grid(),
        pipeline(),
    ]
    notes = (
        "tp ranks share each matrix: all-reduces inside a layer",
        "dp ranks sum their gradients once a step",
        "pp ranks hand activations on, micro-batch by micro-batch",
    )
    parts += [
        text_element(line, x=PIPELINE_LEFT + 8, y=176 + 24 * number, fill="#3c4043")
        for number, line in enumerate(notes)
    ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PAGE.write_text(picture(), encoding="utf-8")
