"""TOML: reading a config file, and writing a whole run as a file that reads back equal."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from weft.config.keys import Flat, flatten, section_of
from weft.errors import ConfigError, Fault

HEADER = "# The whole run: every key that decides it. Repeat it with `weft train` and this file.\n"
MAX_BYTES = 2**20
"""Size of the largest file that is read as a config."""


def read(path: str) -> Flat:
    """The dotted keys of a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not TOML; with line and column.
    """
    try:
        content = _read_bytes(path)
        return flatten(tomllib.loads(content.decode()))
    except FileNotFoundError:
        fix = "check the path; keys are set with two dashes: --optim.lr 0.001"
        fault = Fault(
            "config",
            "no such file",
            got=repr(path),
            need="a TOML file",
            fix=fix,
        )
    except OSError as error:
        fault = Fault(
            "config",
            "cannot read the file",
            got=repr(path),
            need=str(error.strerror),
        )
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text at byte {error.start}"
        fault = Fault(
            "config",
            what,
            need="a TOML file",
            fix="save it as UTF-8",
        )
    except tomllib.TOMLDecodeError as error:
        fault = Fault(
            "config",
            f"{path} is not TOML",
            got=str(error),
            fix=_syntax_hint(str(error)),
        )
    raise ConfigError(fault)


def _read_bytes(path: str) -> bytes:
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(
            Fault(
                "config",
                f"{path} is not a config",
                got=f"over {MAX_BYTES} bytes",
                need="a TOML file",
            )
        )
    return content


def _syntax_hint(message: str) -> str:
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
        if section_of(field):
            header = f"[{section}{name}]"
            nested += ["", header, *_lines(item, section=f"{section}{name}.")]
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
        items = ", ".join(map(value, item))
        return f"[{items}]"
    if isinstance(item, Mapping):
        pairs = [f"{json.dumps(key)} = {value(part)}" for key, part in item.items()]
        return f"{{{', '.join(pairs)}}}"
    return repr(item)
