"""The text of `--help`: boxes that are left out, and that no option's text is lost."""

from __future__ import annotations

from weft.commands.help_text import compact

BOX = """\
╭─ options ────────────────────────────────────╮
│ the run                                      │
│ ──────────────────────────────────────────── │
│ --nproc INT|None  local ranks to start;      │
│                   None: the mesh's size      │
│                   (default: None)            │
│ --a.longer-name {None}|INT                   │
│                   nothing else is known      │
│                   (default: None)            │
│ --out STR         folder (default:           │
│                   '')                        │
│ --steps INT       steps (default: 200)       │
╰──────────────────────────────────────────────╯"""

COMPACT = """\
╭─ options ────────────────────────────────────╮
│ the run                                      │
│ ──────────────────────────────────────────── │
│ --nproc INT       local ranks to start;      │
│                   default: the mesh's size   │
│ --a.longer-name INT                          │
│                   nothing else is known      │
│ --out STR         folder                     │
│ --steps INT       steps (default: 200)       │
╰──────────────────────────────────────────────╯"""


def test_a_default_that_is_nothing_is_explained_by_the_text_or_left_out():
    assert compact(BOX) == COMPACT


def test_compact_boxes_stay_as_they_are():
    assert compact(COMPACT) == COMPACT


def test_choices_that_are_longer_than_a_line_stay_in_the_box():
    broken = """\
│ --data.format {text,auto,chat,instruction,   │
│ prompt}           of the records             │
│                   (default: auto)            │
│ --out STR         folder                     │"""
    whole = """\
│ --data.format {text,auto,chat,instruction,   │
│ prompt}           of the records (default:   │
│                   auto)                      │
│ --out STR         folder                     │"""
    assert compact(broken) == whole


def test_output_without_box_characters_is_compact_too():
    plain = str.maketrans("╭╮╰╯│─", "     -")
    assert compact(BOX.translate(plain)) == COMPACT.translate(plain)
