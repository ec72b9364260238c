"""Owns the tensors of DeepSeek-V3: latent attention, dense and mixed layers, the layer that predicts the second next token.

That layer is published as one more layer with tensors of its own beside it; it repeats embedding and head, which are one
with the model's own.
"""

from __future__ import annotations

from typing import Any

from weft.hf.experts import packed, published
from weft.hf.llama3 import ENDS, MLP, NORMS, REDUNDANT
from weft.hf.table import Pairs, Places, Row, WeightTable, between, rows, same

_WHOLE_Q = {"attn.q.weight": "self_attn.q_proj.weight"}
_LOW_RANK_Q = {
    "attn.q_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.q_b.weight": "self_attn.q_b_proj.weight",
}
_ATTENTION = {
    "attn.kv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
}
_ROUTER = {"mlp.router.proj.weight": "mlp.gate.weight"}
_SHARED = {f"mlp.shared.{name}.weight": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
_SECOND_NEXT = {
    "x_norm.weight": "hnorm.weight",
    "next_norm.weight": "enorm.weight",
    "join.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_SECOND_NEXT_COPIES = {"tok.weight": "embed_tokens.weight", "proj.weight": "shared_head.head.weight"}


def _places(cfg: Any) -> Places:
    """Sets for the layers of the chain, and the same sets with `mtp_` for the layer beside it, which is a mixed one."""
    beside = ((0, cfg.layers),) if cfg.mtp_depth else ()
    mixed = between(cfg.first_k_dense, cfg.layers)
    chain = _sets(cfg, same(cfg.layers), mixed=mixed) | {"dense": same(cfg.first_k_dense)}
    return chain | {f"mtp_{name}": pairs for name, pairs in _sets(cfg, beside, mixed=beside).items()}


def _sets(cfg: Any, every: Pairs, *, mixed: Pairs) -> dict[str, Pairs]:
    return {
        "layer": every,
        "whole_q": () if cfg.q_lora_rank else every,
        "low_rank_q": every if cfg.q_lora_rank else (),
        "mixed": mixed,
        "sharing": mixed if cfg.shared_experts else (),
        "biased": mixed if cfg.scoring == "sigmoid" else (),
    }


def _layer(block: str, head: str) -> tuple[Row, ...]:
    """All rows of a mixed layer, whatever it holds; `block` and `head` have `{}` where the name of a set belongs."""
    groups = {
        "layer": NORMS | _ATTENTION,
        "whole_q": _WHOLE_Q,
        "low_rank_q": _LOW_RANK_Q,
        "mixed": _ROUTER,
        "sharing": _SHARED,
    }
    named = (row for name, names in groups.items() for row in rows(block.format(name), head.format(name), names))
    bias = f"{block.format('biased')}.mlp.router.bias", f"{head.format('biased')}.mlp.gate.e_score_correction_bias"
    return (*named, Row(*bias, is_wide=True), *published(block.format("mixed"), head.format("mixed")))


_CHAIN = ("layer{{{}}}", "model.layers.{{{}}}")
_BESIDE = ("mtp{{mtp_{}}}.layer", "model.layers.{{mtp_{}}}")
_OWN = ("mtp{mtp_layer}", "model.layers.{mtp_layer}")

TABLE = WeightTable(
    family="deepseek",
    places=_places,
    rows=(
        *ENDS,
        *_layer(*_CHAIN),
        *rows(_CHAIN[0].format("dense"), _CHAIN[1].format("dense"), MLP),
        *_layer(*_BESIDE),
        *rows(*_OWN, _SECOND_NEXT),
        *(Row(f"{_OWN[0]}.{our}", f"{_OWN[1]}.{their}", is_copied=True) for our, their in _SECOND_NEXT_COPIES.items()),
    ),
    packed=(
        *packed("layer{mixed}", "model.layers.{mixed}"),
        *packed("mtp{mtp_mixed}.layer", "model.layers.{mtp_mixed}"),
    ),
    redundant=REDUNDANT,
    left_out=lambda cfg: () if cfg.mtp_depth else (f"model.layers.{cfg.layers}.*",),
)
