"""Owns TOML: reading a config file, and writing a whole run as one that reads back equal."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from weft.config.keys import Flat, flatten, table_of
from weft.errors import ConfigError, Fault

HEADER = "# A whole run: every key that decides it. Go again with `weft train` and this file.\n"
MOST_BYTES = 2**20


def read(path: str) -> Flat:
    """The dotted keys of a TOML file.

    Raises:
        ConfigError: when there is no such file, or it is no TOML; with line and column.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(Fault("config", f"{path} is no config", f"over {MOST_BYTES} bytes", "a TOML file"))
        return flatten(tomllib.loads(content.decode()))
    except FileNotFoundError:
        fix = "check the path; keys are set with two dashes: --optim.lr 0.001"
        raise ConfigError(Fault("config", "no such file", got=repr(path), need="a TOML file", fix=fix)) from None
    except OSError as error:
        raise ConfigError(Fault("config", "cannot read the file", got=repr(path), need=str(error.strerror))) from None
    except UnicodeDecodeError as error:
        what = f"{path} is no UTF-8 text at byte {error.start}"
        raise ConfigError(Fault("config", what, need="a TOML file", fix="save it as UTF-8")) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(Fault("config", f"{path} is no TOML", got=str(error), fix=_mend(str(error)))) from None


def _mend(message: str) -> str:
    hint = 'text needs quotes, and a key stands once: key = "text"'
    return "remove or complete that line" if "Expected '='" in message else hint


def dump(config: BaseModel) -> str:
    """A config as TOML with a comment for every key; `None` is left out, as that is what leaving out means."""
    return HEADER + "\n".join(_lines(config, table="")) + "\n"


def _lines(config: BaseModel, table: str) -> list[str]:
    fields = type(config).model_fields
    plain = [name for name, field in fields.items() if not table_of(field) and getattr(config, name) is not None]
    lines = [f"{name} = {value(getattr(config, name))}{_comment(fields[name].description)}" for name in plain]
    for name in (name for name, field in fields.items() if table_of(field)):
        lines += ["", f"[{table}{name}]", *_lines(getattr(config, name), table=f"{table}{name}.")]
    return lines


def _comment(description: str | None) -> str:
    return f"  # {description}" if description else ""


def value(item: Any) -> str:
    """One value as TOML text."""
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(item, tuple | list):
        return f"[{', '.join(map(value, item))}]"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{json.dumps(key)} = {value(part)}' for key, part in item.items())}}}"
    return repr(item)
