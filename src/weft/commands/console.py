"""Shared by all commands: help, a checked run, and output. Only these functions and the views print."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from weft.commands.command import Command
from weft.commands.help_text import compact
from weft.config.command_options import STANDARD_OUTPUT, json_writer
from weft.config.load import try_load
from weft.config.schema import OptimGroup, TrackerName
from weft.errors import EXIT_OK, Fault, UserError
from weft.models import FAMILIES

HELP = ("-h", "--help")
MIN_COLUMNS = 60
"""Width of help on narrower screens: below it boxes have no room for text."""
MAX_COLUMNS = 100
"""Width of help on wide screens."""


def wants_help(words: Sequence[str]) -> bool:
    """Whether a word asks for help."""
    return any(word in HELP for word in words)


def show_help(defaults: BaseModel, usage: str, description: str) -> int:
    """Print usage, description, and the keys of a section with descriptions and defaults."""
    columns = max(shutil.get_terminal_size().columns, MIN_COLUMNS)
    usage_lines = textwrap.wrap(
        f"usage: {usage}", columns, subsequent_indent=" " * 7, break_on_hyphens=False
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
        elif (
            info.type == tuple[TrackerName, ...]
        ):  # as a list of choices it is wider than 60 columns
            metavar = "[NAME [NAME ...]]"
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


def check_files(options: BaseModel, *names: str) -> None:
    """The files that options name can be written: their folders exist, and they are no folders.

    Raises:
        UserError: else, before anything runs.
    """
    faults = [
        fault
        for name in names
        if (path := getattr(options, name)) not in (None, STANDARD_OUTPUT)
        for fault in _file_faults(name, path)
    ]
    if faults:
        raise UserError(*faults)


def _file_faults(key: str, path: str) -> Iterator[Fault]:
    """What is wrong with a file that is to be written."""
    if "\0" in path or not path:
        yield Fault(key, "is no name of a file", got=repr(path), fix=f"--{key} x.{key}")
        return
    file = Path(path)
    if file.is_dir():
        fix = f"--{key} {file / f'x.{key}'}"
        yield Fault(key, "is a folder", got=repr(path), need="a file", fix=fix)
    elif not file.parent.is_dir():
        fix = fix_of_path(path, key)
        yield Fault(key, "its folder does not exist", got=repr(str(file.parent)), fix=fix)
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        fix = f"--{key} with a file in another folder"
        yield Fault(key, "cannot be written", got=repr(path), fix=fix)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal."""
    console = Console(file=sys.stdout, highlight=False, width=shutil.get_terminal_size().columns)
    console.print(table)


def print_json(target: str, fields: Any) -> int:
    """Print fields as JSON, or write them to the file that `--json` names; a number that is not
    finite, which JSON does not have, is null.
    """
    text = json.dumps(_finite(fields), indent=1, allow_nan=False)
    json_writer(target, sys.stdout.write)(f"{text}\n")
    return EXIT_OK


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
