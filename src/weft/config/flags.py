"""The command line of a config: `--a.b value` words, read key by key with tyro so that every fault is reported."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tyro
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from weft.config.keys import (
    SPELLINGS,
    Flat,
    choices,
    example,
    faults_of,
    keys_of,
    need,
    needs_whole_numbers,
    nest,
    plain_types,
    table_key,
    unknown_key,
    whole_number,
)
from weft.errors import ConfigError, Fault

ConfigT = TypeVar("ConfigT", bound=BaseModel)

JOINED = ("mesh",)
"""Keys whose text consists of several words: `--mesh dp2 tp2` needs no quotes."""
MOST_SPELLED = 100
"""Unknown keys for which the nearest spelling is looked up, at half a millisecond each; fewer are shown."""


ALONE = "alone"
"""In the JSON schema of a field: its value where the flag stands alone."""

OPEN = ("optim.groups", "optim.options")
"""Keys whose words are read by validation."""


@dataclass(frozen=True)
class Words:
    """An argv, grouped by flag and not yet parsed."""

    loose: tuple[str, ...]
    flags: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Flags:
    """An argv, parsed: values by dotted key, and what is wrong."""

    values: Flat
    faults: tuple[Fault, ...]


def split(argv: Sequence[str]) -> Words:
    """Group the words after each `--flag`; `--flag=word` is the same, and `-` in a name counts as
    `_`.

    A config file may stand first, or after a flag that has its value already. A short flag, `-n`,
    is grouped under its name with the hyphen: no key has it, so that it is reported as unknown.
    """
    loose: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        wants_value = bool(flags) and not flags[-1][1]
        is_short_flag = re.fullmatch(r"-[A-Za-z]", word) is not None
        is_file = word.endswith((".toml", ".py"))
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            name = name.replace("-", "_")
            flags.append((SPELLINGS.get(name, name), values))
        elif is_short_flag and not wants_value:
            flags.append((word, []))
        elif not flags or (is_file and not wants_value):
            loose.append(word)
        else:
            _, values = flags[-1]
            values.append(word)
    return Words(loose=tuple(loose), flags=tuple((name, tuple(words)) for name, words in flags))


def first_words(words: Words) -> Flat:
    """The first word of every flag, as text."""
    return {name: given[0] for name, given in words.flags if given}


def without(words: Words, prefix: str) -> Words:
    """The words except the flags whose names begin with `prefix`."""
    kept = [flag for flag in words.flags if not flag[0].startswith(prefix)]
    return replace(words, flags=tuple(kept))


def read(words: Words, known: Mapping[str, FieldInfo]) -> Flags:
    """Parse every flag as its key's type; the last of several with one name wins."""
    values: Flat = {}
    faults: list[Fault] = []
    for name, given in words.flags:
        if table_key(name, known) and given:
            values[name] = toml_words(given)
            continue
        if name not in known:
            is_one_of_many = len(faults) >= MOST_SPELLED
            faults.append(
                Fault(name, "unknown key", fix="see --help")
                if is_one_of_many
                else unknown_key(name, known)
            )
            continue
        field = known[name]
        if name in OPEN and given:
            values[name] = given  # validation of the whole config reads them
            continue
        alone = value_alone(field)
        if not given and alone is not None:
            values[name] = alone
            continue
        is_joined = name in JOINED and given
        try:
            values[name] = parse((" ".join(given),) if is_joined else given, field)
        except ValueError:
            if given and choices(field.annotation):
                values[name] = given[0]  # validation of the whole config names the allowed values
            else:
                faults.append(_unreadable(name, given, field))
    return Flags(values, tuple(faults))


def value_alone(field: FieldInfo) -> Any:
    """The value of a flag that stands alone; None: it needs one."""
    if field.annotation is bool:
        return True
    extra = field.json_schema_extra
    return extra.get(ALONE) if isinstance(extra, dict) else None


def read_config(argv: Sequence[str], of: type[ConfigT]) -> ConfigT:
    """A small config from flags alone.

    Raises:
        ConfigError: with every fault.
    """
    words = split(argv)
    known = keys_of(of)
    given = read(words, known)
    loose = [
        Fault(word, "belongs to no flag", fix="flags begin with two dashes") for word in words.loose
    ]
    faults = (*loose, *given.faults)
    try:
        config = of.model_validate(nest(given.values), strict=True)
    except ValidationError as error:
        raise ConfigError(*faults, *faults_of(error, known)) from None
    if faults:
        raise ConfigError(*faults)
    return config


def parse(words: Sequence[str], field: FieldInfo) -> Any:
    """Words as a value of the field's type; its range is not checked.

    Raises:
        ValueError: when they do not make such a value.
    """
    if field.annotation is str and len(words) == 1:
        return words[0]  # tyro would take a word that begins with "-" for a flag
    plain_words = [_plain_word(word, field.annotation) for word in words]
    try:
        with contextlib.redirect_stderr(
            io.StringIO()
        ):  # tyro's own report of the fault; ours is one line
            annotation: Any = field.annotation
            return tyro.cli(annotation, args=plain_words, console_outputs=False)
    except SystemExit:
        raise ValueError(f"cannot read {' '.join(words)!r}") from None


def toml_words(words: Sequence[str]) -> Any:
    """Words as a value of any type: what TOML reads, else text; several words are a tuple."""
    values = []
    for word in words:
        try:
            values.append(tomllib.loads(f"value = {word}")["value"])
        except tomllib.TOMLDecodeError:
            values.append({"True": True, "False": False}.get(word, word))
    if len(values) == 1:
        return values[0]
    return tuple(values)


def _plain_word(word: str, annotation: Any) -> str:
    """The word as tyro reads it: `true` as True, and 1e3 as 1000 where a whole number is needed."""
    if bool in plain_types(annotation) and word.lower() in ("true", "false"):
        return word.capitalize()
    if not needs_whole_numbers(annotation):
        return word
    try:
        number = float(word)
    except ValueError:
        return word
    is_decimal_text = "e" in word.lower() or "." in word
    if is_decimal_text and number.is_integer():
        return str(whole_number(number, annotation))
    return word


def _unreadable(name: str, words: tuple[str, ...], field: FieldInfo) -> Fault:
    what, got = "has no value", "nothing after the flag"
    if words:
        what = "wrong type"
        got = repr(" ".join(words))
    return Fault(name, what, got=got, need=need(field), fix=example(name, field))
