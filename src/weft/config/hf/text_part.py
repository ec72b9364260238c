"""Models of text and images whose text part has a family: its part of config.json, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

TEXT_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
)
"""Architecture of a whole model -> that of its text part."""
TEXT_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    }
)
"""What transformers takes where a `text_config` of Gemma 3 says nothing."""
TEXT_PREFIX = "language_model."


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text part of a model; that of any other model as it is."""
    names = config.get("architectures")
    architecture = (
        TEXT_ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and names else None
    )
    text = config.get("text_config")
    if architecture is None or not isinstance(text, dict):
        return config
    return {**TEXT_DEFAULTS, **text, "architectures": [architecture]}


def text_tensors(tensors: dict[str, T]) -> dict[str, T]:
    """The tensors of the text part of a model, by its names; those of any other model as they are."""
    text = {
        name.removeprefix(TEXT_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(TEXT_PREFIX)
    }
    return text or tensors
