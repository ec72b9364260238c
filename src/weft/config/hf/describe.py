"""Owns reading config.json: which family and which fields, or what weft would compute otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.hf import rope
from weft.config.hf.files import list_tensors, read_json
from weft.config.hf.table import EVERYWHERE, HARMLESS, REQUIRED, ConfigTable, Fixed, Json
from weft.config.hf.tables import table_of
from weft.config.keys import Flat
from weft.errors import CheckpointError, Fault

CONFIG = "config.json"


@dataclass(frozen=True)
class Described:
    """What a folder says of its model.

    Attributes:
        family: weft's name.
        fields: of the family's Config, decided by the folder.
        open: fields that the folder suggests and a person may set otherwise.
    """

    family: str
    fields: Flat
    open: Flat


def describe(folder: Path) -> Described:
    """The model of a folder, from config.json and the names of its tensors.

    Raises:
        CheckpointError: what is missing, or which key weft would compute otherwise; all of them at once.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(Fault(str(folder), "no such folder", need=f"a folder with {CONFIG} and safetensors"))
    config = read_json(path)
    table = table_of(config, key=str(path))
    if faults := tuple(faults_of(config, table, key=str(path))):
        raise CheckpointError(*faults)
    fields = {**table.implied, **{key.ours: key.read(config) for key in table.keys}}
    if table.rope_types:
        fields |= rope.fields(config, table.rope_types)
    names = list_tensors(folder) if table.probes else {}
    probed = {field: int(name.format_map(config) in names) for field, name in table.probes.items()}
    return Described(table.family, fields, probed)


def faults_of(config: Json, table: ConfigTable, *, key: str) -> Iterator[Fault]:
    """Keys that are missing, that weft would compute otherwise, or that it does not know."""
    for row in table.keys:
        value = row.read(config)
        if value is REQUIRED or value is None:
            yield Fault(key, f"has no {row.theirs}")
        elif not isinstance(value, int | float):
            yield Fault(key, f"{row.theirs} is no number", _short(value))
    fixed = (*table.fixed, *EVERYWHERE)
    for rule in fixed:
        yield from _fixed_faults(rule, config, key=key)
    if table.rope_types:
        yield from rope.faults(config, table.rope_types, key=key)
    known = {row.theirs for row in table.keys} | {rule.theirs for rule in fixed} | HARMLESS | table.harmless
    known |= set(rope.KEYS) if table.rope_types else set()
    for name, value in config.items():
        if name not in known and not name.startswith("_") and value is not None:
            fix = f"remove it from {CONFIG} if it changes no logit"
            yield Fault(key, f"{name}: weft does not know what it does", _short(value), fix=fix)


def _fixed_faults(rule: Fixed, config: Json, *, key: str) -> Iterator[Fault]:
    value = config.get(rule.theirs)
    if value is None or value in rule.allowed(config):
        return
    need = " or ".join(map(json.dumps, rule.allowed(config))) or "nothing"
    yield Fault(key, f"{rule.theirs}: not what weft computes", _short(value), need)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
