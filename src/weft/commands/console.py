"""Shared by all commands: help, a checked run, and output. Only these functions and the views print."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from pydantic import BaseModel

from weft.commands.command import Command
from weft.commands.help_text import compact
from weft.config.load import try_load
from weft.config.schema import OptimGroup
from weft.errors import EXIT_OK, Fault, UserError
from weft.models import FAMILIES

HELP = ("-h", "--help")
STANDARD_OUTPUT = "/dev/stdout"
"""As the name of a file: what would be written is printed."""
MIN_COLUMNS = 60
"""Width of help on narrower screens: below it boxes have no room for text."""
MAX_COLUMNS = 100
"""Width of help on wide screens."""


def wants_help(words: Sequence[str]) -> bool:
    """Whether a word asks for help."""
    return any(word in HELP for word in words)


def show_help(
    defaults: BaseModel,
    usage: str,
    description: str,
) -> int:
    """Print usage, description, and the keys of a section with descriptions and defaults."""
    columns = max(shutil.get_terminal_size().columns, MIN_COLUMNS)
    usage_lines = textwrap.wrap(
        f"usage: {usage}",
        columns,
        subsequent_indent=" " * 7,
        break_on_hyphens=False,
    )
    lines = [*usage_lines, "", *textwrap.wrap(description, columns), "", _options_text(defaults)]
    return print_result("\n".join(lines))


def help_of_run(name: str, command: Command, words: Sequence[str]) -> int:
    """Print the keys of a run, with those of the model that the words name."""
    run = try_load([word for word in words if word not in HELP], FAMILIES).run
    description = f"{command.line}. The keys of model are those of {run.model.name}"
    return show_help(run, f"weft {name} {command.usage}", description)


def _options_text(defaults: BaseModel) -> str:
    """The boxes of options as tyro draws them, without its usage and description."""
    encoded = io.BytesIO()
    drawn = io.TextIOWrapper(encoded, encoding=sys.stdout.encoding or "utf-8")
    with _one_column(), contextlib.redirect_stdout(drawn), contextlib.suppress(SystemExit):
        tyro.cli(
            type(defaults),
            default=defaults,
            args=["--help"],
            prog="weft",
            description="",
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
            registry=_registry_of_tables(),
        )
    drawn.flush()
    text = encoded.getvalue().decode(drawn.encoding)
    _, _, options = text.partition("\n\n")
    return compact(options)


@contextlib.contextmanager
def _one_column() -> Iterator[None]:
    """No more columns than one box fills: on wide screens tyro draws boxes side by side."""
    before = os.environ.get("COLUMNS")
    columns = shutil.get_terminal_size().columns
    os.environ["COLUMNS"] = str(min(max(columns, MIN_COLUMNS), MAX_COLUMNS))
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _registry_of_tables() -> tyro.constructors.ConstructorRegistry:
    """How tyro shows values that validation reads itself: tables, and lists of groups."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type == dict[str, Any]:
            metavar = "VALUE"
        elif info.type == tuple[OptimGroup, ...]:
            metavar = "[TEXT [TEXT ...]]"
        else:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar=metavar,
            instance_from_str=lambda words: words,
            is_instance=lambda value: True,
            str_from_instance=lambda value: [],
        )

    return registry


def take_flag(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flag with its value, and all other words."""
    others = list(words)
    if name not in others:
        return [], others
    start = others.index(name)
    end = start + 2
    flag = others[start:end]
    del others[start:end]
    return flag, others


class SplitWords(NamedTuple):
    """The words of a command's own options, and those of the run config."""

    own: list[str]
    others: list[str]


def split_words(words: Sequence[str], options: type[BaseModel]) -> SplitWords:
    """Divide mixed words by the flag before them; a file may follow a flag that has its value.

    Args:
        options: whose fields are the command's own flags.
    """
    split = SplitWords([], [])
    target = split.others
    for word in words:
        is_file = word.endswith((".toml", ".py"))
        if word.startswith("--"):
            flag, _, _ = word[2:].partition("=")
            name = flag.replace("-", "_")
            target = split.own if name in options.model_fields else split.others
        elif is_file and target is split.own:
            wants_value = split.own[-1].startswith("--")
            if not wants_value:
                target = split.others
        target.append(word)
    return split


def check_page_path(path: str) -> None:
    """The file can be written: its folder exists, and it is no folder.

    Raises:
        UserError: else, before anything runs.
    """
    if "\0" in path or not path:
        raise UserError(
            Fault("html", "is no name of a file", got=repr(path), fix="--html page.html")
        )
    file = Path(path)
    folder = file.parent
    if file.is_dir():
        raise UserError(
            Fault(
                "html",
                "is a folder",
                got=repr(path),
                need="a file",
                fix=f"--html {file / 'page.html'}",
            )
        )
    if not folder.is_dir():
        raise UserError(
            Fault(
                "html", "its folder does not exist", got=repr(str(folder)), fix=f"mkdir -p {folder}"
            )
        )
    changed = file if file.exists() else folder
    if not os.access(changed, os.W_OK):
        raise UserError(
            Fault(
                "html",
                "cannot be written",
                got=repr(path),
                fix="--html with a file in another folder",
            )
        )


def print_result(text: str) -> int:
    """Print the output of a command."""
    print(text.rstrip("\n"))
    return EXIT_OK


def prepare_streams() -> None:
    """Have a standard output and error that take every text: characters that their encoding lacks
    are escaped, and what goes to a closed output is discarded, to a closed error goes to the output.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    if sys.stderr is None:
        sys.stderr = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def fix_of_path(path: str, name: str) -> str:
    """What makes a file writable that a flag names: its folder, where that can be made; else another
    name.
    """
    folder = Path(path).parent
    first_there = next((each for each in folder.parents if each.exists()), folder)
    if folder.exists() or not first_there.is_dir():
        return f"another --{name}"
    return f"mkdir -p {folder}, or another --{name}"
