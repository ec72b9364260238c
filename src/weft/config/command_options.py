"""Options of commands among the words of a command line: one reader for all commands, and the options that they share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field
from pydantic.fields import FieldInfo

from weft.config import flags
from weft.config.keys import keys_of
from weft.config.schema import ConfigSection

STANDARD_OUTPUT = "/dev/stdout"
"""As the name of a file: what would be written is printed."""
TRUTH_VALUES = ("True", "False", "true", "false")
FILE_OF_JSON = (".json", ".jsonl")
DEVICES = "/dev/"

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Field name .json.")  # a deprecated method of pydantic

    class JsonOptions(ConfigSection):
        """The option `--json`, which means the same in every command."""

        json: str | None = Field(  # type: ignore[assignment]
            None,
            title="the name of a JSON file",
            examples=["x.json"],
            pattern=r"^/dev/|\.jsonl?$",
            description="print JSON in place of text; with a name.json, write it to that file",
            json_schema_extra={flags.ALONE: STANDARD_OUTPUT},
        )


OptionsT = TypeVar("OptionsT", bound=ConfigSection)


def take_options(words: Sequence[str], of: type[OptionsT]) -> tuple[OptionsT, list[str]]:
    """The options of a command that also takes keys of a run; and all other words, in their order.

    Raises:
        ConfigError: with every fault of the options.
    """
    known = keys_of(of)
    own: list[str] = []
    others: list[str] = []
    for flag, group in _groups(words, known):
        (own if flag in known else others).extend(group)
    return flags.read_config(own, of), others


def read_options(words: Sequence[str], of: type[OptionsT]) -> tuple[OptionsT, list[str]]:
    """The options of a command that takes no other flags; and the words that belong to no flag.

    Raises:
        ConfigError: with every fault of the options.
    """
    own: list[str] = []
    places: list[str] = []
    for flag, group in _groups(words, keys_of(of)):
        (places if flag is None else own).extend(group)
    return flags.read_config(own, of), places


def _groups(
    words: Sequence[str], known: Mapping[str, FieldInfo]
) -> Iterator[tuple[str | None, list[str]]]:
    """Flags with the words that are theirs; words that are no flag's have the name None.

    A switch takes True or False alone, `--json` the name of a JSON file, an option of one value one
    word, and every other flag all words before the next one, but no config file after a value. The
    words of several flags of one option with several values count together.
    """
    several: dict[str, list[str]] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            yield None, [word]
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        values = [value] if equals else list(_values(left, name, known.get(name)))
        if not equals:
            del left[: len(values)]
        if name in known and _is_alone(known[name]) and values[:1] in (["True"], ["true"]):
            values = []
        elif name in known and _is_alone(known[name]) and values[:1] in (["False"], ["false"]):
            continue
        if name in known and takes_several(name, known[name]):
            several.setdefault(name, []).extend(values)
        else:
            yield name, [word] if equals and values else [flag, *values]
    for name, values in several.items():
        yield name, [f"--{name}", *values]


def _values(left: Sequence[str], name: str, field: FieldInfo | None) -> Iterator[str]:
    """The words at the beginning of those that are left which are the values of a flag."""
    for number, word in enumerate(left):
        if word.startswith("--"):
            return
        if field is not None and field.annotation is bool and word not in TRUTH_VALUES:
            return
        if field is not None and _is_alone(field) and not _names_json(word):
            return
        if field is not None and number and not takes_several(name, field):
            return
        if number and word.endswith((".toml", ".py")):
            return
        yield word


def takes_several(name: str, field: FieldInfo) -> bool:
    """Whether a value of this option has several words."""
    return name in flags.JOINED or "tuple" in str(field.annotation)


def _is_alone(field: FieldInfo) -> bool:
    return flags.value_alone(field) is not None and field.annotation is not bool


def _names_json(word: str) -> bool:
    return word in TRUTH_VALUES or word.endswith(FILE_OF_JSON) or word.startswith(DEVICES)


Write = Callable[[str], object]


def json_writer(target: str, write: Write) -> Write:
    """The function that takes the text of `--json`: `write` for the standard output, or one that
    adds to the file.
    """
    if target == STANDARD_OUTPUT:
        return write
    path = Path(target)
    path.write_text("", encoding="utf-8")

    def add(text: str) -> object:
        with path.open("a", encoding="utf-8") as file:
            return file.write(text)

    return add
