"""Writing hardware files: measured figures are added to what a file holds."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.config.efficiency import Efficiency
from weft.config.hardware import (
    SUFFIX,
    Figure,
    HardwareTable,
    fault_of,
    find_hardware,
    parse_table,
    read_fields,
)
from weft.config.toml import value as toml_value
from weft.errors import ConfigError, Fault

HEADER = (
    "# A device and its links; see docs/hardware.md. Written by weft, which keeps no comments.\n"
)
EFFICIENCY = "efficiency"


def next_command(path: str) -> str:
    """What to do with a file that was written: measure what it lacks, or predict with it."""
    name = shlex.quote(path)
    try:
        find_hardware(path)
    except ConfigError:
        return f"weft bench compute --write {name}"
    return f"weft explain --hardware {name}"


def fields_to_extend(path: str, *, published: str | None = None) -> dict[str, Any]:
    """The fields of a hardware file that may lack some; of a device of the table if there is no file.

    Args:
        published: the device.

    Raises:
        ConfigError: the file cannot be written or is not valid, or the device is unknown.
    """
    faults = tuple(_path_faults(path))
    if faults:
        raise ConfigError(*faults)
    if Path(path).exists():
        fields = read_fields(path)
        _check_given(path, fields)
        return fields
    if published is None:
        return {}
    device = find_hardware(published)
    fields = {"label": device.label, "node": device.node}
    for name, figure in device.figures.items():
        fields[name] = fields_of(figure)
    return fields


def _path_faults(path: str) -> Iterator[Fault]:
    if not path.endswith(SUFFIX):
        yield Fault(
            "write",
            "is no hardware file",
            got=repr(path),
            need=f"a name that ends in {SUFFIX}",
            fix=f"--write mine{SUFFIX}",
        )
    elif not Path(path).parent.is_dir():
        fix = f"create it: mkdir -p {Path(path).parent}"
        yield Fault("write", "is in a folder that does not exist", got=repr(path), fix=fix)
    elif not os.access(Path(path).parent, os.W_OK):
        yield Fault(
            "write",
            "is in a folder that cannot be written",
            got=repr(path),
            fix="--write with a file in another folder",
        )


def _check_given(path: str, fields: Mapping[str, Any]) -> None:
    """Raise a ConfigError for every field that is there and not valid."""
    try:
        parse_table(fields)
    except ValidationError as error:
        faults = [fault_of(path, item) for item in error.errors() if item["type"] != "missing"]
        if faults:
            raise ConfigError(*faults) from None


def is_published(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a file holds a published figure of this name."""
    return name in fields and "published" in fields[name]


def fields_of(figure: Figure) -> dict[str, Any]:
    """A figure as its table in a file."""
    return figure.model_dump(exclude_none=True)


def write_fields(path: str, fields: Mapping[str, Any]) -> None:
    """Write a hardware file as a whole: a reader sees the old one or the new one."""
    part = Path(f"{path}.part")
    part.write_text(file_text(fields), encoding="utf-8")
    os.replace(part, path)


def file_text(fields: Mapping[str, Any]) -> str:
    """A hardware file, its fields in the order of `HardwareTable`."""
    lines = [HEADER.rstrip()]
    lines.extend(
        f"{name} = {_text(fields[name])}"
        for name in HardwareTable.model_fields
        if name in fields and name != EFFICIENCY
    )
    efficiency = fields.get(EFFICIENCY)
    if efficiency:
        lines.append("")
        lines.append(f"[{EFFICIENCY}]")
        lines.extend(
            f"{field.name} = {_text(efficiency[field.name])}"
            for field in dataclass_fields(Efficiency)
            if field.name in efficiency
        )
    lines.append("")
    return "\n".join(lines)


def _text(item: Any) -> str:
    if not isinstance(item, Mapping):
        return toml_value(item)
    pairs = [f"{name} = {_text(value)}" for name, value in item.items()]
    listed = ", ".join(pairs)
    return f"{{{listed}}}"
