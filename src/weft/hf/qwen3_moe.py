"""Owns the tensors of Qwen3's mixed models: a router and stacked experts in place of the feed-forward part."""

from __future__ import annotations

from weft.hf.experts import packed, published
from weft.hf.llama3 import ATTENTION, ENDS, NORMS, OURS, REDUNDANT, THEIRS
from weft.hf.qwen3 import QK_NORMS
from weft.hf.table import WeightTable, rows, same

_ROUTER = {"mlp.router.proj.weight": "mlp.gate.weight"}

TABLE = WeightTable(
    family="qwen3-moe",
    places=lambda cfg: {"layer": same(cfg.layers)},
    rows=(*ENDS, *rows(OURS, THEIRS, NORMS | ATTENTION | QK_NORMS | _ROUTER), *published(OURS, THEIRS)),
    packed=packed(OURS, THEIRS),
    redundant=REDUNDANT,
)
