"""GPT-2 in Hugging Face's format (GPT2LMHeadModel): weights lie as [in, out], and q, k, v side by side."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.hf.mapping import (
    ConfigMapping,
    Fixed,
    HFMapping,
    Json,
    Key,
    Slice,
    WeightMapping,
    WeightRule,
)

_LAYER, _HF_LAYER = "layer{layer}", "transformer.h.{layer}"
_LINEARS = {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_NORMS = {"attn_norm": "ln_1", "mlp_norm": "ln_2"}


def _default_ffn(config: Json) -> int | None:
    return 4 * config["n_embd"] if "n_embd" in config else None


def _layer_rules() -> Iterator[WeightRule]:
    fused = f"{_HF_LAYER}.attn.c_attn"
    for index, name in enumerate(("q", "k", "v")):
        linear = f"{_LAYER}.attn.{name}"
        yield WeightRule(
            f"{linear}.weight", f"{fused}.weight", Slice(index, 3, dim=1), transposed=True
        )
        yield WeightRule(f"{linear}.bias", f"{fused}.bias", Slice(index, 3, dim=0))
    for linear, hf_linear in _LINEARS.items():
        yield WeightRule(
            f"{_LAYER}.{linear}.weight", f"{_HF_LAYER}.{hf_linear}.weight", transposed=True
        )
        yield WeightRule(f"{_LAYER}.{linear}.bias", f"{_HF_LAYER}.{hf_linear}.bias")
    for norm, hf_norm in _NORMS.items():
        yield WeightRule(f"{_LAYER}.{norm}.weight", f"{_HF_LAYER}.{hf_norm}.weight")
        yield WeightRule(f"{_LAYER}.{norm}.bias", f"{_HF_LAYER}.{hf_norm}.bias")


HF = HFMapping(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    scored="GPT2ForSequenceClassification",
    config=ConfigMapping(
        keys=(
            Key("n_layer", "layers"),
            Key("n_embd", "dim"),
            Key("n_head", "heads"),
            Key("n_inner", "ffn", default=_default_ffn),
            Key("vocab_size", "vocab"),
            Key("n_positions", "max_seq_len", default=1024),
            Key("layer_norm_epsilon", "norm_eps", default=1e-5),
        ),
        fixed=(
            Fixed("activation_function", ("gelu_new", "gelu_pytorch_tanh"), is_written=True),
            Fixed("tie_word_embeddings", (True,), is_written=True),
            Fixed("scale_attn_weights", (True,)),
            Fixed("scale_attn_by_inverse_layer_idx", (False,)),
            Fixed("reorder_and_upcast_attn", (False,)),
        ),
        ignored=frozenset(
            (
                *(
                    "n_ctx",
                    "resid_pdrop",
                    "embd_pdrop",
                    "attn_pdrop",
                    "summary_type",
                    "summary_use_proj",
                ),
                *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
            )
        ),
        constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    weights=WeightMapping(
        rules=(
            WeightRule("embed.tok.weight", "transformer.wte.weight"),
            WeightRule("embed.pos.weight", "transformer.wpe.weight"),
            *_layer_rules(),
            WeightRule("head.norm.weight", "transformer.ln_f.weight"),
            WeightRule("head.norm.bias", "transformer.ln_f.bias"),
            WeightRule("head.proj.weight", "lm_head.weight"),
        ),
        ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
        prefix="transformer.",
    ),
)
