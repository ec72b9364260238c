"""Owns the command line of a config: `--a.b value` words, read by tyro key by key, so that every fault is told."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tyro
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from weft.config.keys import Flat, choices, example, faults_of, keys_of, need, nest, unknown_key
from weft.errors import ConfigError, Fault

ConfigT = TypeVar("ConfigT", bound=BaseModel)

JOINED = ("mesh",)
"""Text that is made of words: `--mesh dp2 tp2` needs no quotes."""


@dataclass(frozen=True)
class Words:
    """An argv, taken apart and not yet understood."""

    loose: tuple[str, ...]
    flags: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Flags:
    """An argv, read: values by dotted key, and what is wrong."""

    values: Flat
    faults: tuple[Fault, ...]


def split(argv: Sequence[str]) -> Words:
    """Group the words after each `--flag`; `--flag=word` is the same, and `-` in a name counts as `_`.

    A config file may stand first, or after a flag that has its value already.
    """
    loose: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif not flags or (flags[-1][1] and word.endswith(".toml")):
            loose.append(word)
        else:
            flags[-1][1].append(word)
    return Words(tuple(loose), tuple((name, tuple(words)) for name, words in flags))


def first_words(words: Words) -> Flat:
    """The first word of every flag, as it stands."""
    return {name: given[0] for name, given in words.flags if given}


def without(words: Words, prefix: str) -> Words:
    """The words but for the flags whose names begin with `prefix`."""
    return replace(words, flags=tuple(flag for flag in words.flags if not flag[0].startswith(prefix)))


def read(words: Words, known: Mapping[str, FieldInfo]) -> Flags:
    """Read every flag as its key's type; the last of several with one name wins."""
    values: Flat = {}
    faults: list[Fault] = []
    for name, given in words.flags:
        if name not in known:
            faults.append(unknown_key(name, known))
            continue
        joined = (" ".join(given),) if name in JOINED and given else given
        try:
            values[name] = parse(joined, known[name])
        except ValueError:
            if given and choices(known[name].annotation):
                values[name] = given[0]  # the look at the whole config says what it could be
            else:
                faults.append(_unreadable(name, given, known[name]))
    return Flags(values, tuple(faults))


def read_config(argv: Sequence[str], of: type[ConfigT]) -> ConfigT:
    """A small config from flags alone.

    Raises:
        ConfigError: with every fault.
    """
    words, known = split(argv), keys_of(of)
    given = read(words, known)
    loose = [Fault(word, "belongs to no flag", fix="flags begin with two dashes") for word in words.loose]
    faults = (*loose, *given.faults)
    try:
        config = of.model_validate(nest(given.values), strict=True)
    except ValidationError as error:
        raise ConfigError(*faults, *faults_of(error, known)) from None
    if faults:
        raise ConfigError(*faults)
    return config


def parse(words: Sequence[str], field: FieldInfo) -> Any:
    """Words as a value of the field's type; its range is not looked at.

    Raises:
        ValueError: when they do not make such a value.
    """
    if field.annotation is str and len(words) == 1:
        return words[0]  # tyro would take a word that begins with "-" for a flag
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's own account of the fault; ours is one line
            return tyro.cli(field.annotation, args=list(words), console_outputs=False)  # type: ignore[arg-type]
    except SystemExit:
        raise ValueError(f"cannot read {' '.join(words)!r}") from None


def _unreadable(name: str, words: tuple[str, ...], field: FieldInfo) -> Fault:
    what, got = ("wrong type", repr(" ".join(words))) if words else ("has no value", "nothing after the flag")
    return Fault(name, what, got, need(field), example(name, field))
