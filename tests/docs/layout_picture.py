"""Pictures of pp2 dp2 tp2: its ranks as a grid, the pipeline that they execute, and both side by side for README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.core.mesh import Mesh
from weft.schedule.catalog import make_table
from weft.schedule.simulate import UNIT_COSTS, simulate
from weft.view.svg import svg
from weft.view.svg_elements import document_start, element, text_element

MESH = Mesh.parse("pp2 dp2 tp2")
MICRO_BATCHES = 4
WIDTH, HEIGHT = 1240, 260
CELL_WIDTH, CELL_HEIGHT, GAP = 106, 66, 6
LEFT, TOP = 74, 62
STAGE_GAP = 26
PIPELINE_LEFT = 560
MESH_WIDTH, PIPELINE_WIDTH = 548, 500
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


def pipeline(width: int) -> str:
    """What the two stages execute, as `weft schedule 1f1b --ranks 2 --microbatches 4` draws it."""
    table = make_table("1f1b", ranks=2, microbatches=MICRO_BATCHES)
    timeline = simulate(table, lambda act: UNIT_COSTS[act.kind])
    title = "a step, 1F1B: forward of micro-batch 0 to 3, backward B0 to B3"
    return svg(timeline, title=title, width=width).replace(">rank ", ">pp ")


def mesh_picture() -> str:
    """The document of the grid alone."""
    return _document(MESH_WIDTH, list(grid()))


def pipeline_picture() -> str:
    """The document of the pipeline alone."""
    return pipeline(PIPELINE_WIDTH)


def picture() -> str:
    """The document of both."""
    drawn = pipeline(WIDTH - PIPELINE_LEFT).replace("<svg ", f'<svg x="{PIPELINE_LEFT}" y="44" ', 1)
    notes = (
        "tp ranks share each matrix: all-reduces inside a layer",
        "dp ranks sum their gradients once a step",
        "pp ranks hand activations on, micro-batch by micro-batch",
    )
    lines = [
        text_element(line, x=PIPELINE_LEFT + 8, y=200 + 22 * number, fill="#3c4043")
        for number, line in enumerate(notes)
    ]
    return _document(WIDTH, [*grid(), drawn, *lines])


def _document(width: int, parts: Sequence[str]) -> str:
    start = document_start(width, HEIGHT, font_family="monospace", font_size=13)
    background = element("rect", width=width, height=HEIGHT, fill="white")
    return "\n".join([start, background, *parts, "</svg>", ""])
