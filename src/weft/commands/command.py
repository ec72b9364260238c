"""A command of the program `weft`, and the commands of other installed packages, which entry points name."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.start.installed import installed, load_installed

ENTRY_POINTS = "weft.commands"
"""Group of entry points by which installed packages name their commands, as objects of `Command`.

A name of two words, such as `prove --mutants`, is a mode: a command with a flag that it hands over.
"""


@dataclass(frozen=True)
class Command:
    """One command: what its help says, and the function that gets the words after its name.

    Attributes:
        usage: its arguments.
        line: what it does.
        purpose: the heading of `weft --help` under which it stands.
        modes: flags with which the command of an entry point (`prove --mutants`) gets all words.
    """

    usage: str
    line: str
    run: Callable[[Sequence[str]], int]
    purpose: str = "others"
    modes: tuple[str, ...] = ()


def imported(path: str) -> Callable[[Sequence[str]], int]:
    """The function "module:function", whose module is imported when the command runs."""

    def run(words: Sequence[str]) -> int:
        module, _, function = path.partition(":")
        code: int = getattr(importlib.import_module(module), function)(words)
        return code

    return run


def installed_command(name: str) -> Command | None:
    """The command of this name in another package; None where no installed package has one.

    Raises:
        WeftError: the package cannot be imported.
    """
    command: Command | None = installed(ENTRY_POINTS, name)
    return command


def installed_commands() -> dict[str, Command]:
    """All commands of other packages by name, without modes.

    Raises:
        WeftError: a package cannot be imported.
    """
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {each.name: load_installed(each) for each in sorted(entries) if " " not in each.name}
