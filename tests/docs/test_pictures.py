"""Pictures of README and of the documentation are what their programs draw; every picture is shown on a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.docs.pictures import DOCS, FOLDER, OF_RUNS, PICTURES
from tests.docs.terminal_recording import frames
from tests.programs import programs

IMAGE = re.compile(r"!\[[^\]]+\]\((?:docs/)?((?:pictures|images)/[^)]+)\)")
"""With a text for those who do not see it."""
RECORDING = "train"
NOT_ON_A_PAGE = {"images/social.png"}
MOST_IMAGE_BYTES = 200_000


@pytest.mark.parametrize("name", sorted({*PICTURES} - {RECORDING}))
def test_a_picture_is_what_its_program_draws(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]()


def test_the_recording_is_what_the_screen_shows_of_the_recorded_events() -> None:
    """In another process: a style of rich keeps the codes of the first terminal it was used on."""
    code = "from tests.docs.terminal_recording import recording; print(recording(), end='')"
    drawn = programs().run(code).stdout
    assert (FOLDER / f"{RECORDING}.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_RUNS)
def test_a_picture_of_a_run_is_what_its_command_writes(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == OF_RUNS[name]()


def test_the_recording_ends_with_the_proof_of_the_recorded_run() -> None:
    times = [at_s for at_s, _ in frames()]
    assert times == sorted(times)
    last = [line.plain for line in list(frames())[-1][1]]
    assert any("40/40" in line for line in last)
    assert last[-1].startswith("equal: ")


def test_every_picture_is_shown_and_every_shown_picture_is_there() -> None:
    pages = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    shown = {name for page in pages for name in IMAGE.findall(page.read_text(encoding="utf-8"))}
    files = {
        f"{folder}/{path.name}"
        for folder in ("pictures", "images")
        for path in (DOCS / folder).iterdir()
    }
    assert shown == {name for name in files if name.endswith((".svg", ".png"))} - NOT_ON_A_PAGE


def test_images_are_small_and_drawings_are_well_formed() -> None:
    sizes = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    assert {name: size for name, size in sizes.items() if size > MOST_IMAGE_BYTES} == {}
    for path in [*FOLDER.glob("*.svg"), *(DOCS / "site").glob("*.svg")]:
        assert ElementTree.parse(path).getroot().tag.endswith("svg"), path.name
