"""Writes config.json from a family's Config, so that transformers computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.config.hf.mapping import IGNORED, Families, HFMapping, Json
from weft.config.hf.read_config import hf_mappings
from weft.core.model_config import ModelConfig
from weft.errors import Fault

REWRITTEN = frozenset(("dtype", "transformers_version"))
"""Keys that do not survive an export."""


def config_json(
    mapping: HFMapping,
    cfg: ModelConfig,
    *,
    dtype: str,
    original: Json | None = None,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """config.json of a model without `unwritable` faults.

    Args:
        dtype: of its tensors, torch's name.
        original: config.json that the model was imported with: its keys that change no logit are
            kept.
        classes: names of the labels; none: those of transformers.
    """
    table = mapping.config
    if table.whole is not None:
        names = {"model_type": mapping.model_type, "torch_dtype": dtype}
        return {**table.whole.write(cfg), **_head(mapping, cfg, classes), **names}
    found: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    found.update(table.constants)
    found.update(
        {
            name: value
            for name, value in (original or {}).items()
            if name in IGNORED | table.ignored and name not in REWRITTEN
        }
    )
    found.update(_head(mapping, cfg, classes))
    found["model_type"] = mapping.model_type
    found["torch_dtype"] = dtype
    values = {row.hf_key: row.write(getattr(cfg, row.field)) for row in table.keys}
    found.update(values)
    for rule in table.fixed:
        if rule.is_written:
            found[rule.hf_key] = rule.allowed(values)[0]
    if table.rope:
        found.update(table.rope.write(cfg))
    for field, name in table.counts.items():
        found[name] = getattr(cfg, field)
    return found


def _head(mapping: HFMapping, cfg: ModelConfig, classes: Sequence[str]) -> dict[str, Any]:
    """The class of transformers, and the names of labels where its head scores texts."""
    labels = getattr(cfg, "labels", 0)
    if not labels:
        return {"architectures": [mapping.architecture]}
    known = classes or [f"LABEL_{number}" for number in range(labels)]
    return {
        "architectures": [mapping.scored_architecture],
        "id2label": {str(number): name for number, name in enumerate(known)},
        "label2id": {name: number for number, name in enumerate(known)},
    }


def unwritable(cfg: ModelConfig, families: Families) -> Iterator[Fault]:
    """Why transformers cannot compute this model, if it cannot."""
    mapping = families[cfg.family].hf
    if mapping is None:
        need = f"one of {', '.join(hf_mappings(families))}"
        yield Fault(
            "model.name", "has no counterpart in transformers", got=repr(cfg.family), need=need
        )
        return
    yield from mapping.config.unwritable(cfg)
    if mapping.config.rope:
        yield from mapping.config.rope.unwritable(cfg)
