"""TOML: reading a config file, and writing a whole run as a file that reads back equal."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from weft.config.keys import Flat, flatten, section_of
from weft.errors import ConfigError, Fault
from weft.small_files import MIB, UnreadableFile, parse_toml, read_bytes

HEADER = "# The whole run: every key that decides it, format 2. Repeat it with `weft train` and this file.\n"
OLD_HEADER = b"# The whole run: every key that decides it. "
"""Of runs in whose files `optim.min_lr` is a rate, not a share of `optim.lr`."""
MAX_BYTES = MIB
"""Size of the largest file that is read as a config."""
LONG_LIST = 120
"""Columns of a list of texts that is written on one line."""
OTHER_FORMATS = (".yaml", ".yml", ".json")
MAX_KEYS = 1000
"""Keys of a config file: more are no config."""


def read(path: str) -> Flat:
    """The dotted keys of a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not TOML; with line and column.
    """
    try:
        content = read_bytes(Path(path), max_bytes=MAX_BYTES)
        keys = flatten(parse_toml(content.decode("utf-8-sig")))
        if content.startswith(OLD_HEADER):
            keys = _with_shares(keys)
        if len(keys) <= MAX_KEYS:
            return keys
        fault = Fault(
            "config", f"{path} is not a config", got=f"{len(keys)} keys", need=f"at most {MAX_KEYS}"
        )
    except UnreadableFile as error:
        fault = _file_fault(path, error)
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text at byte {error.start}"
        fault = Fault("config", what, need="a TOML file", fix="save it as UTF-8")
    except tomllib.TOMLDecodeError as error:
        fault = Fault(
            "config",
            f"{path} is not TOML",
            got=str(error),
            fix=_syntax_hint(str(error), Path(path).suffix.lower()),
        )
    except ValueError as error:
        fault = Fault(
            "config",
            f"{path} is not a config",
            got=str(error).partition(";")[0],
            need="a TOML file",
            fix="shorten what is too long or too deep",
        )
    raise ConfigError(fault)


def _with_shares(keys: Flat) -> Flat:
    """The keys of a run of an earlier format as this one has them."""
    rate, last = keys.get("optim.lr"), keys.get("optim.min_lr")
    if not isinstance(rate, float) or not isinstance(last, float) or not rate:
        return keys
    return {**keys, "optim.min_lr": min(last / rate, 1.0)}


def _file_fault(path: str, error: UnreadableFile) -> Fault:
    if error.is_missing:
        fix = "check the path; keys are set with two dashes: --optim.lr 0.001"
        return Fault("config", "no such file", got=repr(path), need="a TOML file", fix=fix)
    if error.got:
        got = f"{path!r}: {error.got}"
    else:
        got = repr(path)
    return Fault("config", error.what, got=got, need="a TOML file", fix="check the file")


def _syntax_hint(message: str, suffix: str) -> str:
    if suffix in OTHER_FORMATS:
        return "write its keys as TOML, for example steps = 20, sections as [optim]"
    if "Expected '='" in message:
        return "remove or complete that line"
    return 'text needs quotes, and a key stands once: key = "text"'


def dump(config: BaseModel) -> str:
    """A config as TOML with a comment for every key; keys that are None are left out, which means
    the same.
    """
    return HEADER + "\n".join(_lines(config, section="")) + "\n"


def _lines(config: BaseModel, section: str) -> list[str]:
    """Plain keys first, then the sections inside."""
    lines: list[str] = []
    nested: list[str] = []
    for name, field in type(config).model_fields.items():
        item = getattr(config, name)
        path = f"{section}{name}"
        if section_of(field):
            nested.append("")
            nested.append(f"[{path}]")
            nested.extend(_lines(item, section=f"{path}."))
        elif item is not None:
            comment = f"  # {field.description}" if field.description else ""
            lines.append(f"{name} = {value(item)}{comment}")
    return lines + nested


def value(item: Any) -> str:
    """One value as TOML text."""
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(item, tuple | list):
        return _list_text(item)
    if isinstance(item, BaseModel):
        fields = item.model_dump(exclude_none=True)
        return value(fields)
    if isinstance(item, Mapping):
        pairs = [f"{json.dumps(key)} = {value(part)}" for key, part in item.items()]
        listed = ", ".join(pairs)
        return f"{{{listed}}}"
    return repr(item)


def _list_text(items: Sequence[Any]) -> str:
    """On one line, or a long list of texts with one a line."""
    texts = [value(item) for item in items]
    line = f"[{', '.join(texts)}]"
    are_texts = all(isinstance(item, str) for item in items)
    if len(line) <= LONG_LIST or not are_texts:
        return line
    rows = "".join(f"  {text},\n" for text in texts)
    return f"[\n{rows}]"
