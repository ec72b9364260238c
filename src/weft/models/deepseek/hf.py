"""DeepSeek-V3 in Hugging Face's format (DeepseekV3ForCausalLM).

The layer of multi-token prediction is published as one more layer, with tensors of its own beside
it; it repeats embedding and head, which are tied to the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.hf.mapping import (
    ConfigMapping,
    Fixed,
    HFMapping,
    IndexPairs,
    IndexSets,
    Key,
    WeightMapping,
    WeightRule,
    name_rules,
    same_indices,
)
from weft.config.hf.rope import ScaledRope
from weft.errors import Fault
from weft.models.common.decoder_hf import (
    ENDS,
    MLP,
    NORMS,
    PADDING_ID,
    ROTARY_BUFFERS,
    ROUTER,
    SILU,
    packed_experts,
    published_experts,
    same_as_heads,
)

_FULL_RANK_Q = {"attn.q.weight": "self_attn.q_proj.weight"}
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
_SHARED_EXPERTS = {
    "mlp.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "mlp.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "mlp.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
_SECOND_NEXT = {
    "x_norm.weight": "hnorm.weight",
    "next_norm.weight": "enorm.weight",
    "join.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_SECOND_NEXT_COPIES = {
    "tok.weight": "embed_tokens.weight",
    "proj.weight": "shared_head.head.weight",
}


def _index_sets(cfg: Any) -> IndexSets:
    """Sets for the layers of the chain, and the same sets with `mtp_` for the layer of multi-token
    prediction.
    """
    mixed = same_indices(range(cfg.first_k_dense, cfg.layers))
    mtp: IndexPairs = ((0, cfg.layers),) if cfg.mtp_depth else ()
    sets = _layer_sets(cfg, same_indices(range(cfg.layers)), mixed=mixed)
    sets["dense"] = same_indices(range(cfg.first_k_dense))
    for name, pairs in _layer_sets(cfg, mtp, mixed=mtp).items():
        sets[f"mtp_{name}"] = pairs
    return sets


def _layer_sets(cfg: Any, layers: IndexPairs, *, mixed: IndexPairs) -> dict[str, IndexPairs]:
    return {
        "layer": layers,
        "full_rank_q": () if cfg.q_lora_rank else layers,
        "low_rank_q": layers if cfg.q_lora_rank else (),
        "mixed": mixed,
        "sharing": mixed if cfg.shared_experts else (),
        "biased": mixed if cfg.scoring == "sigmoid" else (),
    }


def _layer_rules(layer: str, hf_layer: str) -> Iterator[WeightRule]:
    """Rules of a mixed layer with all options; `layer` and `hf_layer` have `{}` in place of an
    index set's name.
    """
    groups = {
        "layer": NORMS | _ATTENTION,
        "full_rank_q": _FULL_RANK_Q,
        "low_rank_q": _LOW_RANK_Q,
        "mixed": ROUTER,
        "sharing": _SHARED_EXPERTS,
    }
    for set_name, names in groups.items():
        yield from name_rules(layer.format(set_name), hf_layer.format(set_name), names)
    bias = f"{layer.format('biased')}.mlp.router.bias"
    hf_bias = f"{hf_layer.format('biased')}.mlp.gate.e_score_correction_bias"
    yield WeightRule(bias, hf_bias, keep_float32=True)
    yield from published_experts(layer.format("mixed"), hf_layer.format("mixed"))


def _second_next_rules() -> Iterator[WeightRule]:
    """Rules of the side block beside its layer."""
    block, hf_layer = "mtp{mtp_layer}", "model.layers.{mtp_layer}"
    yield from name_rules(block, hf_layer, _SECOND_NEXT)
    for param, tensor in _SECOND_NEXT_COPIES.items():
        yield WeightRule(f"{block}.{param}", f"{hf_layer}.{tensor}", write_alias=True)


def _unused(cfg: Any) -> tuple[str, ...]:
    return () if cfg.mtp_depth else (f"model.layers.{cfg.layers}.*",)


def _unwritable(cfg: Any) -> Iterator[Fault]:
    if cfg.scoring != "sigmoid":
        yield Fault(
            "model.scoring", "DeepSeek-V3 in transformers has another", repr(cfg.scoring), "sigmoid"
        )


HF = HFMapping(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    config=ConfigMapping(
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
            PADDING_ID,
            Key("max_position_embeddings", "max_seq_len", default=4096),
            Key("rms_norm_eps", "norm_eps", default=1e-6),
        ),
        fixed=(
            Fixed("num_key_value_heads", same_as=same_as_heads, is_written=True),
            SILU,
            Fixed("attention_bias", (False,), is_written=True),
            Fixed("scoring_func", ("sigmoid",), is_written=True),
            Fixed("topk_method", ("noaux_tc",), is_written=True),
            Fixed("moe_layer_freq", (1,), is_written=True),
            Fixed("tie_word_embeddings", (False,), is_written=True),
            Fixed("rope_interleave", (True,)),
        ),
        rope=ScaledRope(("default", "yarn"), own="yarn"),
        # transformers writes num_nextn_predict_layers = 1 also where it has left those layers out: their tensors decide
        probes={"mtp_depth": "model.layers.{num_hidden_layers}.eh_proj.weight"},
        counts={"mtp_depth": "num_nextn_predict_layers"},
        implied={"scoring": "sigmoid"},
        ignored=frozenset(
            (
                *(
                    "aux_loss_alpha",
                    "seq_aux",
                    "ep_size",
                    "experts_implementation",
                    "output_router_logits",
                ),
                *("num_nextn_predict_layers", "head_dim", "qk_head_dim"),
            )
        ),
        unwritable=_unwritable,
    ),
    weights=WeightMapping(
        index_sets=_index_sets,
        rules=(
            *ENDS,
            *_layer_rules("layer{{{}}}", "model.layers.{{{}}}"),
            *name_rules("layer{dense}", "model.layers.{dense}", MLP),
            *_layer_rules("mtp{{mtp_{}}}.layer", "model.layers.{{mtp_{}}}"),
            *_second_next_rules(),
        ),
        packed=(
            *packed_experts("layer{mixed}", "model.layers.{mixed}"),
            *packed_experts("mtp{mtp_mixed}.layer", "model.layers.{mtp_mixed}"),
        ),
        ignored=ROTARY_BUFFERS,
        unused=_unused,
    ),
)
