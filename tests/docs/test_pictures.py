"""Pictures of README are what their programs draw."""

from __future__ import annotations

from tests.docs import layout_picture, terminal_recording


def test_the_picture_of_a_layout_is_drawn_from_its_mesh_and_schedule() -> None:
    assert layout_picture.PAGE.read_text(encoding="utf-8") == layout_picture.picture()


def test_the_terminal_recording_has_the_recorded_lines() -> None:
    drawn = (terminal_recording.FOLDER / "train.svg").read_text(encoding="utf-8")
    assert drawn == terminal_recording.recording()
