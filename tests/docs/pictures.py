"""Pictures of README and of the documentation, each with what draws it.

PYTHONPATH=. python -m tests.docs.pictures     writes them, as `make pictures` and `make docs` do
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import results_page

from tests.docs import layout_picture, terminal_recording
from tests.docs.social_card import social_card
from weft.cli import main
from weft.report.png_picture import png_of
from weft.view.explain_page import fullest
from weft.view.memory_chart import memory_chart

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "pictures"
SOCIAL = DOCS / "images" / "social.png"
EXPLAINED = ["--mesh", "pp4 dp2", "--hardware", "h100"]
SIMULATED = ["--mesh", "pp4 dp2 tp2", "--hardware", "h100", "--batch.global_size", "32"]


def written_by(*words: str) -> str:
    """What a command writes to the file that is added to its words."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"picture.{words[-1].lstrip('-')}"
        code = main([*words, str(file)])
        assert code == 0, words
        return file.read_text(encoding="utf-8")


def memory_picture() -> str:
    """The staircase of the fullest rank, as the page of `weft explain --html` has it."""
    fields = json.loads(written_by("explain", *EXPLAINED, "--json"))
    return memory_chart(fullest(fields["roles"]), limit_bytes=None) + "\n"


def result_picture(name: str) -> str:
    """The curves of a result, from its kept figures."""
    return results_page.result_picture(results_page.read(name))


def schedule_picture(name: str) -> str:
    """A schedule on four ranks."""
    return written_by("schedule", name, "--svg")


PICTURES: Mapping[str, Callable[[], str]] = {
    "train": terminal_recording.recording,
    "layout": layout_picture.picture,
    "mesh": layout_picture.mesh_picture,
    "pipeline": layout_picture.pipeline_picture,
    **{
        name: partial(schedule_picture, name)
        for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dual_pipe_v")
    },
    **{f"results-{name}": partial(result_picture, name) for name in results_page.names()},
}
"""Name of an SVG file -> its text."""
OF_RUNS: Mapping[str, Callable[[], str]] = {
    "memory": memory_picture,
    "simulated": partial(written_by, "simulate", *SIMULATED, "--svg"),
}
"""The same; they import torch."""


def write_all() -> None:
    """Write every picture."""
    for name, draw in {**PICTURES, **OF_RUNS}.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
    SOCIAL.write_bytes(png_of(social_card()))


if __name__ == "__main__":
    write_all()
