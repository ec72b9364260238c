"""Owns the tensors of Qwen3: LLaMA's, and the norms of queries and keys."""

from __future__ import annotations

from weft.hf.llama3 import ATTENTION, ENDS, MLP, NORMS, OURS, REDUNDANT, THEIRS
from weft.hf.table import WeightTable, rows, same

QK_NORMS = {f"attn.{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"}

TABLE = WeightTable(
    family="qwen3",
    places=lambda cfg: {"layer": same(cfg.layers)},
    rows=(*ENDS, *rows(OURS, THEIRS, NORMS | ATTENTION | QK_NORMS | MLP)),
    redundant=REDUNDANT,
)
