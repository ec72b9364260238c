"""Owns config.json of Qwen3's mixed models (Qwen3MoeForCausalLM)."""

from __future__ import annotations

from weft.config.hf.qwen3 import TRUNK_FIXED, TRUNK_HARMLESS, TRUNK_KEYS, all_attend_fully
from weft.config.hf.table import ConfigTable, Fixed, Key

TABLE = ConfigTable(
    family="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys=(
        *TRUNK_KEYS,
        Key("num_experts", "experts", default=lambda config: config.get("num_local_experts")),
        Key("num_experts_per_tok", "top_k", default=8),
        Key("moe_intermediate_size", "expert_ffn", default=768),
        Key("norm_topk_prob", "norm_topk_prob", default=False),
    ),
    fixed=(
        *TRUNK_FIXED,
        Fixed("layer_types", same_as=all_attend_fully),
        Fixed("decoder_sparse_step", (1,), is_written=True),
        Fixed("mlp_only_layers", ([],), is_written=True),
        Fixed("num_local_experts", same_as=lambda config: config.get("num_experts", config.get("num_local_experts"))),
    ),
    rope_types=("default",),
    harmless=TRUNK_HARMLESS
    | {"intermediate_size", "output_router_logits", "router_aux_loss_coef", "experts_implementation"},
    added={"intermediate_size": 6144},  # of dense layers, of which there are none
)
