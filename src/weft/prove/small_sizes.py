"""Small sizes of every model family, as arguments of a command; a new family needs no entry here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.config.schema import ModelSection
from weft.errors import UserError
from weft.layout.plan import Plan
from weft.models import FAMILIES

SMALL_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "layers": "3",
        "dim": "32",
        "heads": "4",
        "kv_heads": "2",
        "head_size": "8",
        "ffn": "48",
        "max_seq_len": "64",
        "window": "5",
        "experts": "4",
        "top_k": "2",
        "expert_ffn": "16",
        "balance_loss": "0.3",
        "balance_rate": "0.05",
        "first_k_dense": "1",
        "q_lora_rank": "12",
        "kv_lora_rank": "10",
        "qk_nope_head_dim": "6",
        "qk_rope_head_dim": "4",
        "v_head_dim": "8",
        "mtp_depth": "1",
    }
)
"""Values of the fields that families have."""

OTHER_SIZES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"gpt2": {"vocab": "257"}}  # a vocabulary that no number of ranks divides
)


def small_words(family: str) -> tuple[str, ...]:
    """Flags that make a model of this family small."""
    fields = FAMILIES[family].Config.model_fields
    sizes = {**SMALL_SIZES, **OTHER_SIZES.get(family, {})}
    words: list[str] = []
    for name, value in sizes.items():
        if name in fields:
            words += (f"--model.{name}", value)
    return tuple(words)


def accepts_sizes(model: ModelSection, plan: Plan) -> bool:
    """Whether a user's model takes the sizes of its config; models of weft take all that are valid."""
    if not FAMILIES.is_user_model(model.name):
        return True
    from weft.train.model_checks import check_user_model  # late: it imports torch

    try:
        check_user_model(FAMILIES[model.name], model, plan)
    except UserError:
        return False
    return True
