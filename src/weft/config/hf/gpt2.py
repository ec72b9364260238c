"""Owns config.json of GPT-2 (GPT2LMHeadModel)."""

from __future__ import annotations

from weft.config.hf.table import ConfigTable, Fixed, Key

TABLE = ConfigTable(
    family="gpt2",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    keys=(
        Key("n_layer", "layers"),
        Key("n_embd", "dim"),
        Key("n_head", "heads"),
        Key("n_inner", "ffn", default=lambda config: 4 * config["n_embd"] if "n_embd" in config else None),
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
    harmless=frozenset(
        (
            *("n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj"),
            *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        )
    ),
    added={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)
