"""Owns the tensors of LLaMA, which other families share in part: names only, everything lies as ours does."""

from __future__ import annotations

from weft.hf.table import Row, WeightTable, rows, same

OURS, THEIRS = "layer{layer}", "model.layers.{layer}"
ATTENTION = {f"attn.{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
NORMS = {"attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
ENDS = (
    Row("embed.tok.weight", "model.embed_tokens.weight"),
    Row("head.norm.weight", "model.norm.weight"),
    Row("head.proj.weight", "lm_head.weight"),
)
REDUNDANT = ("*.rotary_emb.inv_freq",)

TABLE = WeightTable(
    family="llama3",
    places=lambda cfg: {"layer": same(cfg.layers)},
    rows=(*ENDS, *rows(OURS, THEIRS, NORMS | ATTENTION | MLP)),
    redundant=REDUNDANT,
)
