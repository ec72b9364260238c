"""Owns the list of config tables, and which one a config.json belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.hf import deepseek, gpt2, llama3, qwen3, qwen3_moe
from weft.config.hf.table import ConfigTable, Json
from weft.errors import CheckpointError, Fault

TABLES: Mapping[str, ConfigTable] = {
    module.TABLE.family: module.TABLE for module in (gpt2, llama3, qwen3, qwen3_moe, deepseek)
}


def table_of(config: Json, *, key: str) -> ConfigTable:
    """The table of this config.json.

    Raises:
        CheckpointError: an architecture that weft does not have, with those that it has.
    """
    named, model_type = config.get("architectures"), config.get("model_type")
    architecture = named[0] if isinstance(named, list) and named else None
    known = {table.architecture: table for table in TABLES.values()}
    by_type = {table.model_type: table for table in TABLES.values()}
    if architecture in known:
        return known[architecture]
    if architecture is None and model_type in by_type:
        return by_type[model_type]
    got = repr(architecture or model_type)
    raise CheckpointError(Fault(key, "unknown architecture", got, f"one of {', '.join(sorted(known))}"))
