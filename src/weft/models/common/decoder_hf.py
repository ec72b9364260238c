"""Keys and tensor names that Hugging Face's LLaMA-like architectures share, as parts of a family's hf.py. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.hf.mapping import EXPERT, Fixed, Json, Key, Slice, WeightRule, name_rules
from weft.config.hf.read_config import MAX_LAYERS


def same_as_heads(config: Json) -> int | None:
    """Default of num_key_value_heads: no grouping."""
    return config.get("num_attention_heads")


def full_width_head_size(config: Json) -> int:
    """The head size of heads that fill the width of the model."""
    dim = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if not isinstance(dim, int) or not isinstance(heads, int) or heads <= 0:
        return 0
    return dim // heads


def full_attention_layers(config: Json) -> list[str]:
    """`layer_types` of a model in which every token sees all tokens before it."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > MAX_LAYERS:
        return []
    return ["full_attention"] * layers


PADDING_ID = Key("pad_token_id", "padding_id", default=None, may_be_none=True)
DECODER_KEYS = (
    Key("num_hidden_layers", "layers"),
    Key("hidden_size", "dim"),
    Key("num_attention_heads", "heads"),
    Key("num_key_value_heads", "kv_heads", default=same_as_heads),
    Key("vocab_size", "vocab"),
    PADDING_ID,
    Key("rms_norm_eps", "norm_eps", default=1e-6),
)
SILU = Fixed("hidden_act", ("silu", "swish"), is_written=True)

LAYER = ("layer{layer}", "model.layers.{layer}")
ENDS = (
    WeightRule("embed.tok.weight", "model.embed_tokens.weight"),
    WeightRule("head.norm.weight", "model.norm.weight"),
    WeightRule("head.proj.weight", "lm_head.weight"),
)
NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
ATTENTION = {
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
}
QKV_BIAS = {
    "attn.q.bias": "self_attn.q_proj.bias",
    "attn.k.bias": "self_attn.k_proj.bias",
    "attn.v.bias": "self_attn.v_proj.bias",
}
QK_NORMS = {
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
}
MLP = {
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
ROUTER = {"mlp.router.proj.weight": "mlp.gate.weight"}
ROTARY_BUFFERS = ("*.rotary_emb.inv_freq",)


def decoder_rules(*names: Mapping[str, str]) -> tuple[WeightRule, ...]:
    """Embedding, last norm, head, and these names in every layer."""
    rules = list(ENDS)
    for each in names:
        rules.extend(name_rules(*LAYER, each))
    return tuple(rules)


def published_experts(layer: str, hf_layer: str) -> tuple[WeightRule, ...]:
    """One tensor an expert: `experts.7.gate_proj.weight` [F, D] and so on; the parameter [E, F, D]
    is the stack.
    """
    rules: list[WeightRule] = []
    for name in ("gate", "up", "down"):
        param = f"{layer}.mlp.experts.{name}"
        tensor = f"{hf_layer}.mlp.experts.{EXPERT}.{name}_proj.weight"
        rules.append(WeightRule(param, tensor))
    return tuple(rules)


def packed_experts(layer: str, hf_layer: str) -> tuple[WeightRule, ...]:
    """As transformers holds experts in memory: `experts.gate_up_proj` [E, 2F, D], gate first, and
    `experts.down_proj`.
    """
    gate_up = f"{hf_layer}.mlp.experts.gate_up_proj"
    return (
        WeightRule(f"{layer}.mlp.experts.gate", gate_up, Slice(0, 2, dim=1)),
        WeightRule(f"{layer}.mlp.experts.up", gate_up, Slice(1, 2, dim=1)),
        WeightRule(f"{layer}.mlp.experts.down", f"{hf_layer}.mlp.experts.down_proj"),
    )
