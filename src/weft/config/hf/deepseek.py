"""Owns config.json of DeepSeek-V3 (DeepseekV3ForCausalLM)."""

from __future__ import annotations

from weft.config.hf.table import ConfigTable, Fixed, Key

TABLE = ConfigTable(
    family="deepseek",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys=(
        Key("num_hidden_layers", "layers"),
        Key("first_k_dense_replace", "first_k_dense", default=3),
        Key("hidden_size", "dim"),
        Key("num_attention_heads", "heads"),
        Key("q_lora_rank", "q_lora_rank", default=1536, null=0),
        Key("kv_lora_rank", "kv_lora_rank", default=512),
        Key("qk_nope_head_dim", "qk_nope_head_dim", default=128),
        Key("qk_rope_head_dim", "qk_rope_head_dim", default=64),
        Key("v_head_dim", "v_head_dim", default=128),
        Key("intermediate_size", "ffn"),
        Key("n_routed_experts", "experts"),
        Key("num_experts_per_tok", "top_k", default=8),
        Key("moe_intermediate_size", "expert_ffn"),
        Key("n_shared_experts", "shared_experts", default=1),
        Key("n_group", "n_group", default=8),
        Key("topk_group", "topk_group", default=4),
        Key("norm_topk_prob", "norm_topk_prob", default=True),
        Key("routed_scaling_factor", "routed_scaling_factor", default=2.5),
        Key("vocab_size", "vocab"),
        Key("max_position_embeddings", "max_seq_len", default=4096),
        Key("rms_norm_eps", "norm_eps", default=1e-6),
    ),
    fixed=(
        Fixed("num_key_value_heads", same_as=lambda config: config.get("num_attention_heads"), is_written=True),
        Fixed("hidden_act", ("silu", "swish"), is_written=True),
        Fixed("attention_bias", (False,), is_written=True),
        Fixed("scoring_func", ("sigmoid",), is_written=True),
        Fixed("topk_method", ("noaux_tc",), is_written=True),
        Fixed("moe_layer_freq", (1,), is_written=True),
        Fixed("tie_word_embeddings", (False,), is_written=True),
        Fixed("rope_interleave", (True,)),
    ),
    rope_types=("default", "yarn"),
    # transformers writes num_nextn_predict_layers = 1 also where it has left those layers out: their tensors tell
    probes={"mtp_depth": "model.layers.{num_hidden_layers}.eh_proj.weight"},
    counts={"mtp_depth": "num_nextn_predict_layers"},
    implied={"scoring": "sigmoid"},
    harmless=frozenset(
        (
            *("aux_loss_alpha", "seq_aux", "ep_size", "experts_implementation", "output_router_logits"),
            *("num_nextn_predict_layers", "head_dim", "qk_head_dim"),
        )
    ),
)
