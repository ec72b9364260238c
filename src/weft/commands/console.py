"""Owns what all commands share: help, flags taken out of the words, a run checked at the door, lines to the person.

Only these lines and the views reach a person's screen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

import tyro
from pydantic import BaseModel

from weft.config import lora, validate
from weft.config.checks import Check, run_checks
from weft.config.load import try_load
from weft.config.run import Run
from weft.errors import EXIT_OK, UserError
from weft.models import FAMILIES
from weft.train import preflight

HELP = ("-h", "--help")


def load_checked_run(words: Sequence[str], surroundings: Iterable[Check] = ()) -> Run:
    """The run that these words describe.

    Raises:
        UserError: with every fault of its keys, of how they fit together, and of the surroundings.
    """
    loaded = try_load(words, FAMILIES)
    if faults := run_checks(loaded.run, (*validate.CHECKS, *lora.CHECKS, *surroundings), known=loaded.faults):
        raise UserError(*faults)
    return loaded.run


def wants_help(words: Sequence[str]) -> bool:
    """Whether a word asks for help."""
    return any(word in HELP for word in words)


def show_help(defaults: BaseModel, usage: str, description: str) -> int:
    """Print what tyro makes of a table of keys."""
    try:
        tyro.cli(
            type(defaults),
            default=defaults,
            args=["--help"],
            prog=usage,
            description=description,
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
        )
    except SystemExit:
        return EXIT_OK
    raise AssertionError("tyro answers --help by leaving")


def take_flag(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flag with its word, and all other words."""
    if name not in words:
        return [], list(words)
    place = list(words).index(name)
    return list(words[place : place + 2]), [*words[:place], *words[place + 2 :]]


def set_openmp_policy() -> None:
    """Before torch is loaded: OpenMP threads that wait sleep instead of spinning, so that they leave the cores to others.

    Measured with two threads on two cores that others use too: 221 ms a step instead of 1,820.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def print_result(text: str) -> int:
    """What a command was asked for."""
    print(text.rstrip("\n"))
    return EXIT_OK


def print_messages(lines: Iterable[str]) -> None:
    """One line each for the person, once a machine."""
    if preflight.is_first(os.environ, preflight.LOCAL_RANKS):
        for line in lines:
            print(line, file=sys.stderr)
