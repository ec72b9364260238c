"""Small configs of every discovered language model family: sizes by field name, so a new family needs no entry here."""

from __future__ import annotations

from weft.config.hf.read_config import hf_mappings
from weft.core.model_config import ModelConfig
from weft.models import FAMILIES

SIZES: dict[str, object] = {
    "layers": 4,
    "dim": 64,  # its root is a float32 number: transformers scales Gemma's embedding in float32
    "heads": 4,
    "kv_heads": 2,
    "head_size": 12,
    "ffn": 48,
    "vocab": 53,
    "max_seq_len": 64,
    "window": 5,
    "experts": 8,
    "top_k": 3,
    "expert_ffn": 16,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
}
"""Two query heads share a key/value head; a window of 5 hides keys of every sequence of 8 tokens or
more.
"""

TEXT_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.Config.kind == "tokens")
HF_FAMILIES = tuple(hf_mappings(FAMILIES))


def small_fields(family: str, **changes: object) -> dict[str, object]:
    """The sizes that the family has, with `changes` of those that it has."""
    known = FAMILIES[family].Config.model_fields
    fields = {**SIZES, **changes}
    return {name: value for name, value in fields.items() if name in known}


def small_config(family: str, **changes: object) -> ModelConfig:
    """A config of a family with these sizes."""
    return FAMILIES[family].Config(**small_fields(family, **changes))
