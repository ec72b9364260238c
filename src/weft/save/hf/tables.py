"""Owns the list of weight tables. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping

from weft.save.hf import deepseek, gpt2, llama3, qwen3, qwen3_moe
from weft.save.hf.table import WeightTable

TABLES: Mapping[str, WeightTable] = {
    module.TABLE.family: module.TABLE for module in (gpt2, llama3, qwen3, qwen3_moe, deepseek)
}
