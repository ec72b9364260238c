"""Models of several parts, such as text and images: the config.json of their text part, as transformers reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.hf.architectures import architectures
from weft.errors import CheckpointError, Fault, type_and_message

TIES = "tie_word_embeddings"
ROPE = "rope_parameters"
PART = "_config"
"""End of the keys whose value is the config of a part."""
NO_PARTS = ("quantization_config", "compression_config")
PLANES = "mrope"
"""Start of the keys of rotary positions in time, height and width, which are equal in texts."""


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text part of a model; that of any other model as it is.

    A text part that transformers has no decoder for has the config of the one that its name
    extends: Qwen3 for Qwen3-VL. `weft.hf.check_text_part` compares what both compute.

    Raises:
        CheckpointError: transformers rejects the config, or has no such decoder.
    """
    whole = whole_config_of(config)
    if whole is None:
        return config
    text = whole.get_text_config(decoder=True)
    model_type = next(_decoders_of(text.model_type), None)
    if model_type in (None, whole.model_type):  # or the whole model, whose layers attend to images
        what = f"{whole.model_type}: transformers has no decoder for its text part"
        fix = "the folder of a model of text (docs/huggingface.md)"
        raise CheckpointError(Fault("config.json", what, got=text.model_type, fix=fix))
    found = text.to_diff_dict()
    if model_type != text.model_type:
        found = _as_decoder(found, model_type)
    if hasattr(text, TIES):  # the whole model ties as its own config says
        found[TIES] = getattr(whole, TIES, False)
    return {**found, "architectures": [architectures()[model_type]]}


def whole_config_of(config: dict[str, Any]) -> Any:
    """transformers' config of a model of several parts, of which one is a decoder of text; None: it
    is no such model, or transformers, which tells, is not installed or does not know it.

    Raises:
        CheckpointError: transformers rejects it.
    """
    has_parts = any(
        name.endswith(PART) and name not in NO_PARTS and isinstance(value, dict)
        for name, value in config.items()
    )
    if not has_parts or not architectures():
        return None
    from transformers import CONFIG_MAPPING  # an extra, and seconds to import

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(dict(config))
        text = whole.get_text_config(decoder=True)
    except Exception as error:
        what = f"transformers rejects it: {type_and_message(error)}"
        raise CheckpointError(Fault("config.json", what)) from error
    reads_text_alone = text is not whole and not text.is_encoder_decoder
    return whole if reads_text_alone else None


def _decoders_of(model_type: str) -> Iterator[str]:
    """Types of decoders that a text part may be: its own, then those whose words are in its name."""
    words = set(model_type.split("_"))
    if model_type in architectures():
        yield model_type
    of_name = (name for name in architectures() if words.issuperset(name.split("_")))
    yield from sorted(of_name, key=lambda name: name.count("_"), reverse=True)


def _as_decoder(text: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The keys of a text part as the config of a decoder, for which all positions are of one plane."""
    rope = (text.get(ROPE) or {}).items()
    one_plane = {name: value for name, value in rope if not name.startswith(PLANES)}
    return {**text, ROPE: one_plane, "model_type": model_type}
