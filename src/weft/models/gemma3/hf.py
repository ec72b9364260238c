"""Gemma 3's text models in Hugging Face's format (Gemma3ForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from weft.config.hf.mapping import ConfigMapping, Fixed, HFMapping, Json, Key, WeightMapping
from weft.config.hf.read_config import MAX_LAYERS
from weft.config.hf.rope import LONGEST, THETA, ScaledRope, rope_parameters
from weft.config.keys import Flat
from weft.core.model_config import ModelConfig
from weft.core.rope_scaling import KINDS
from weft.errors import Fault
from weft.models.common.decoder_hf import (
    ATTENTION,
    DECODER_KEYS,
    MLP,
    PADDING_ID,
    QK_NORMS,
    ROTARY_BUFFERS,
    decoder_rules,
)

_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
_GLOBAL_EVERY, _GLOBAL_THETA = 6, 1_000_000.0
"""What transformers takes where nothing is set."""
_GLOBAL_ROPE = ScaledRope(("default", *KINDS))


@dataclass(frozen=True)
class LayerTypeRope:
    """Rotary embedding with a base for each type of layers (a `RopeMapping`), scaled in those without
    a window.

    Old style: `rope_theta` and `rope_local_base_freq`; new style: `rope_parameters` by layer type.
    """

    @property
    def hf_keys(self) -> tuple[str, ...]:
        """Keys of config.json that are read here."""
        return (*ScaledRope().hf_keys, "rope_local_base_freq")

    def faults(self, config: Json, *, key: str) -> Iterator[Fault]:
        """Settings that weft computes differently, or not at all."""
        for field, part in _rope_parts(config).items():
            of_layers = _GLOBAL_ROPE if field == "rope_theta" else ScaledRope()
            longest = {LONGEST: config.get(LONGEST)}
            yield from of_layers.faults({**longest, **part}, key=key)
        flat, table = config.get("rope_parameters"), config.get("rope_scaling")
        is_flat = isinstance(flat, dict) and bool(flat) and "full_attention" not in flat
        has_old_name = isinstance(table, dict) and "rope_type" not in table and "type" in table
        if is_flat or has_old_name:
            what = "rope: transformers does not read these settings of Gemma 3 there"
            got = "rope_parameters of all layers" if is_flat else "type in rope_scaling"
            need = "rope_parameters by type of layer, or rope_scaling with rope_type"
            yield Fault(key, what, got=got, need=need)

    def fields(self, config: Json) -> Flat:
        """The Config's fields of a config.json without faults."""
        parts = _rope_parts(config)
        local = rope_parameters(parts["rope_local_theta"])["rope_theta"]
        longest = {LONGEST: config.get(LONGEST)}
        return {
            **_GLOBAL_ROPE.fields({**longest, **parts["rope_theta"]}),
            "rope_local_theta": local,
        }

    def write(self, cfg: ModelConfig) -> dict[str, Any]:
        """Keys of config.json, old style."""
        values = cfg.model_dump()
        return {**_GLOBAL_ROPE.write(cfg), "rope_local_base_freq": values["rope_local_theta"]}

    def unwritable(self, cfg: ModelConfig) -> Iterator[Fault]:
        """Nothing: every value can be written."""
        yield from ()


def _rope_parts(config: Json) -> dict[str, dict[str, Any]]:
    """Field -> the keys of its layers' rotary embedding, as in a model with one type of layers."""
    by_type = config.get("rope_parameters")
    if isinstance(by_type, dict) and "full_attention" in by_type:
        return {
            "rope_theta": {
                "rope_theta": _GLOBAL_THETA,
                "rope_parameters": by_type["full_attention"],
            },
            "rope_local_theta": {"rope_parameters": by_type.get("sliding_attention")},
        }
    global_keys = {key: config[key] for key in ScaledRope().hf_keys if key in config}
    global_keys["rope_theta"] = config.get("rope_theta") or _GLOBAL_THETA
    local_keys = {"rope_theta": config.get("rope_local_base_freq") or THETA}
    return {"rope_theta": global_keys, "rope_local_theta": local_keys}


def _global_every(config: Json) -> int:
    """Distance of layers without a window, as `layer_types` has it."""
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, list):
        return _GLOBAL_EVERY
    if "full_attention" in layer_types:
        return int(layer_types.index("full_attention")) + 1
    return max(_GLOBAL_EVERY, len(layer_types) + 1)


def _layer_types(config: Json) -> list[str]:
    layers = config.get("num_hidden_layers")
    every = config.get("sliding_window_pattern")
    if not isinstance(every, int) or not every:
        every = _global_every(config)
    num_layers = layers if isinstance(layers, int) and layers <= MAX_LAYERS else 0
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]


def _padding_id(config: Json) -> int | None:
    found: int | None = config.get("pad_token_id", 0)
    return found


HF = HFMapping(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    scored="Gemma3TextForSequenceClassification",
    config=ConfigMapping(
        keys=(
            *DECODER_KEYS,
            replace(PADDING_ID, default=_padding_id),
            Key("head_dim", "head_size", default=256),
            Key("intermediate_size", "ffn"),
            Key("max_position_embeddings", "max_seq_len", default=131_072),
            Key("sliding_window", "window", default=4096),
            Key("sliding_window_pattern", "global_every", default=_global_every),
            Key("query_pre_attn_scalar", "query_pre_attn_scalar", default=256),
            Key("tie_word_embeddings", "tied", default=True),
        ),
        fixed=(
            Fixed("hidden_activation", ("gelu_pytorch_tanh",), is_written=True),
            Fixed("attention_bias", (False,), is_written=True),
            Fixed("layer_types", same_as=_layer_types, is_written=True),
            Fixed("attn_logit_softcapping"),
            Fixed("final_logit_softcapping"),
            Fixed("use_bidirectional_attention", (False,)),
        ),
        rope=LayerTypeRope(),
        ignored=frozenset(("cache_implementation",)),
    ),
    weights=WeightMapping(
        rules=decoder_rules(_NORMS, ATTENTION, QK_NORMS, MLP), ignored=ROTARY_BUFFERS
    ),
)
