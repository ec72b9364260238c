"""Owns writing config.json: from a family's Config, so that transformers computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.hf import rope
from weft.config.hf.table import HARMLESS, Json
from weft.config.hf.tables import TABLES
from weft.core.model_config import ModelConfig
from weft.errors import Fault


def config_json(family: str, cfg: ModelConfig, *, dtype: str, kept: Json | None = None) -> dict[str, Any]:
    """config.json of a model of which `unwritable` says nothing.

    Args:
        dtype: of its tensors, torch's name.
        kept: config.json that the model came with: its keys that change no logit stay.
    """
    table = TABLES[family]
    head = {"architectures": [table.architecture], "model_type": table.model_type, "torch_dtype": dtype}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    harmless = (HARMLESS | table.harmless) - {"dtype", "transformers_version"}
    stays = {name: value for name, value in (kept or {}).items() if name in harmless}
    values = {row.theirs: row.write(getattr(cfg, row.ours)) for row in table.keys}
    fixed = {rule.theirs: rule.allowed(values)[0] for rule in table.fixed if rule.is_written}
    turns = rope.write(cfg, table.rope_types) if table.rope_types else {}
    counts = {name: getattr(cfg, field) for field, name in table.counts.items()}
    return {**tokens, **table.added, **stays, **head, **values, **fixed, **turns, **counts}


def unwritable(family: str, cfg: ModelConfig) -> Iterator[Fault]:
    """What transformers' model of the family does not compute."""
    if family not in TABLES:
        yield Fault("model.name", "has no counterpart in transformers", repr(family), f"one of {', '.join(TABLES)}")
        return
    if family == "deepseek" and getattr(cfg, "scoring", "sigmoid") != "sigmoid":
        yield Fault(
            "model.scoring", "DeepSeek-V3 in transformers has another", repr(cfg.model_dump()["scoring"]), "sigmoid"
        )
    if TABLES[family].rope_types:
        yield from rope.unwritable(cfg)
