"""The one reader of the options of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from weft.config.command_options import (
    STANDARD_OUTPUT,
    JsonOptions,
    json_writer,
    read_options,
    take_options,
)
from weft.errors import ConfigError


class Options(JsonOptions):
    """Options of every kind."""

    full: bool = Field(False)
    first: int = Field(4, ge=1)
    name: str = Field("")
    layouts: tuple[str, ...] = Field(())


@pytest.mark.parametrize(
    ("words", "given", "others"),
    [
        ("--full run", {"full": True}, ["run"]),
        ("--full True run", {"full": True}, ["run"]),
        ("--full=False run", {}, ["run"]),
        ("run --first 3", {"first": 3}, ["run"]),
        ("--first 3 run", {"first": 3}, ["run"]),
        ("--json run", {"json": STANDARD_OUTPUT}, ["run"]),
        ("--json True run", {"json": STANDARD_OUTPUT}, ["run"]),
        ("--json False run", {}, ["run"]),
        ("--json x.json run", {"json": "x.json"}, ["run"]),
        ("--json=x.json run", {"json": "x.json"}, ["run"]),
        ("run --json", {"json": STANDARD_OUTPUT}, ["run"]),
        ("--layouts dp2 tp2 --layouts pp2", {"layouts": ("dp2", "tp2", "pp2")}, []),
        ("--name=--x", {"name": "--x"}, []),
        ("--name -3", {"name": "-3"}, []),
    ],
)
def test_options_may_stand_anywhere(
    words: str, given: dict[str, object], others: list[str]
) -> None:
    for read in (take_options, read_options):
        options, rest = read(words.split(), Options)
        assert options == Options(**given)
        assert rest == others


def test_keys_of_a_run_stay_in_their_order() -> None:
    words = "run.toml --mesh dp2 tp2 --full --optim.lr 1e-3 --first 2 --steps 5"
    options, others = take_options(words.split(), Options)
    assert options == Options(full=True, first=2)
    assert others == ["run.toml", "--mesh", "dp2", "tp2", "--optim.lr", "1e-3", "--steps", "5"]


def test_unknown_flags_and_wrong_values_are_faults() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        read_options(["--fist", "3"], Options)
    with pytest.raises(ConfigError, match="first: out of range"):
        take_options(["--first", "0"], Options)
    with pytest.raises(ConfigError, match="first: has no value"):
        take_options(["--first"], Options)


def test_json_goes_to_the_output_or_to_a_file(tmp_path: Path) -> None:
    seen: list[str] = []
    json_writer(STANDARD_OUTPUT, seen.append)("{}\n")
    assert seen == ["{}\n"]
    file = tmp_path / "x.json"
    file.write_text("old")
    add = json_writer(str(file), seen.append)
    add("{}\n")
    add("[]\n")
    assert file.read_text() == "{}\n[]\n"
