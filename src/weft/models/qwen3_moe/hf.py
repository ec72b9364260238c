"""Qwen3's mixture-of-experts models in Hugging Face's format (Qwen3MoeForCausalLM)."""

from __future__ import annotations

from weft.config.hf.mapping import ConfigMapping, Fixed, HFMapping, Json, Key, WeightMapping
from weft.config.hf.rope import ScaledRope
from weft.core.rope_scaling import KINDS
from weft.models.common.decoder_hf import (
    ATTENTION,
    LAYER,
    NORMS,
    QK_NORMS,
    ROTARY_BUFFERS,
    ROUTER,
    decoder_rules,
    full_width_head_size,
    packed_experts,
    published_experts,
)
from weft.models.qwen3.hf import FIXED, IGNORED, KEYS


def _num_experts(config: Json) -> int | None:
    experts: int | None = config.get("num_experts", config.get("num_local_experts"))
    return experts


HF = HFMapping(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config=ConfigMapping(
        keys=(
            *KEYS,
            Key("head_dim", "head_size", default=full_width_head_size),
            Key("num_experts", "experts", default=_num_experts),
            Key("num_experts_per_tok", "top_k", default=8),
            Key("moe_intermediate_size", "expert_ffn", default=768),
            Key("norm_topk_prob", "norm_topk_prob", default=False),
        ),
        fixed=(
            *FIXED,
            Fixed("decoder_sparse_step", (1,), is_written=True),
            Fixed("mlp_only_layers", ([],), is_written=True),
            Fixed("num_local_experts", same_as=_num_experts),
        ),
        rope=ScaledRope(("default", *KINDS)),
        ignored=IGNORED
        | {
            "intermediate_size",
            "output_router_logits",
            "router_aux_loss_coef",
            "experts_implementation",
        },
        constants={"intermediate_size": 6144},  # of dense layers, of which there are none
    ),
    weights=WeightMapping(
        rules=(*decoder_rules(NORMS, ATTENTION, QK_NORMS, ROUTER), *published_experts(*LAYER)),
        packed=packed_experts(*LAYER),
        ignored=ROTARY_BUFFERS,
    ),
)
