"""`weft complete`: the scripts complete commands, keys and choices in the shells themselves."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence

import pytest

from weft.cli import all_commands, main
from weft.commands.complete import CompletedCommand, completed, script
from weft.errors import EXIT_USER

COMMANDS = [
    CompletedCommand("train", {"--device": ("auto", "cpu"), "--data.source": ()}),
    CompletedCommand("trace", {"--step": ()}),
    CompletedCommand("data", {}),
]


def in_bash(words: Sequence[str]) -> list[str]:
    """How bash completes what is typed so far."""
    lines = [
        script("bash", COMMANDS),
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _weft",
        "printf '%s ' ${COMPREPLY[@]}",
    ]
    return shell("bash", "\n".join(lines))


def in_zsh(words: Sequence[str]) -> list[str]:
    """How zsh completes what is typed so far; it drops words that do not begin with it by itself."""
    lines = [
        "compadd() { shift; printf '%s ' $@ }; _files() { }",
        f"words=({shlex.join(words)}); CURRENT={len(words)}",
        script("zsh", COMMANDS),
    ]
    return [word for word in shell("zsh", "\n".join(lines)) if word.startswith(words[-1])]


def shell(name: str, text: str) -> list[str]:
    command = [name, *(["-f"] if name == "zsh" else ["--norc"]), "-c", text]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}")


@pytest.mark.parametrize(
    "offered",
    [pytest.param(in_bash, marks=needs("bash")), pytest.param(in_zsh, marks=needs("zsh"))],
)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["weft", "tra"], ["train", "trace"]),
        (["weft", "train", "--d"], ["--device", "--data.source"]),
        (["weft", "train", "--device", ""], ["auto", "cpu"]),
        (["weft", "train", "--data.source", "te"], []),  # the shell offers files
        (["weft", "trace", "--"], ["--step"]),
        (["weft", "data", "--"], []),
    ],
)
def test_a_shell_offers_commands_keys_and_choices(
    offered: Callable[[Sequence[str]], list[str]], words: list[str], expected: list[str]
) -> None:
    assert offered(words) == expected


def test_every_command_is_completed_with_the_keys_of_its_help() -> None:
    commands = {name: all_commands()[name] for name in ("train", "sweep", "report", "data")}
    found = {command.name: command.choices for command in completed(commands)}
    assert list(found) == list(commands)
    assert found["train"]["--device"] == ("auto", "cpu", "cuda")
    assert {"--mesh", "--pipeline.schedule", "--save.every"} <= found["train"].keys()
    assert {"--array", "--optim.lr"} <= found["sweep"].keys()
    assert "--svg" in found["report"]
    assert "--optim.lr" not in found["report"]


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "tcsh"]) == EXIT_USER
    line = "error: weft complete: takes a shell (got tcsh; need one of bash, zsh). Fix: "
    assert capsys.readouterr().err.startswith(line)
