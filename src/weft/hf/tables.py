"""Owns the list of weight tables, and a folder held against its own. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weft.config.hf.files import list_tensors
from weft.core.model_config import ModelConfig
from weft.hf import deepseek, gpt2, llama3, qwen3, qwen3_moe
from weft.hf.match import Matched, match
from weft.hf.table import WeightTable
from weft.models import FAMILIES

TABLES: Mapping[str, WeightTable] = {
    module.TABLE.family: module.TABLE for module in (gpt2, llama3, qwen3, qwen3_moe, deepseek)
}


def match_folder(folder: Path, cfg: ModelConfig) -> Matched:
    """How the tensors of a folder make up the parameters of this model; no tensor is read.

    Raises:
        CheckpointError: tensors that are missing, left over or do not fit, files that are missing or damaged.
    """
    ties = FAMILIES[cfg.family].ties(cfg)
    return match(TABLES[cfg.family], cfg, list_tensors(folder), ties=ties, folder=str(folder))
