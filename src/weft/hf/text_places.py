"""Where the text part of a model of several parts lies in it, and in the decoder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.config.hf.read_config import CONFIG
from weft.errors import CheckpointError, Fault, type_and_message


@dataclass(frozen=True)
class Places:
    """Paths of trunk and head in the whole model, and in the decoder."""

    trunk: str
    head: str
    own_trunk: str
    own_head: str

    def own_name(self, name: str) -> str | None:
        """The name in the decoder of a tensor of the whole model; None: it belongs to another part."""
        for path, own in ((self.trunk, self.own_trunk), (self.head, self.own_head)):
            if name.startswith(f"{path}."):
                return f"{own}{name.removeprefix(path)}".removeprefix(".")
        return None

    def whole_name(self, name: str) -> str:
        """The name in the whole model of a module of the decoder's trunk."""
        return f"{self.trunk}{name.removeprefix(self.own_trunk)}"


@dataclass(frozen=True)
class PlacedText:
    """transformers' model of several parts and its decoder, without memory."""

    whole: Any
    decoder: Any
    at: Places


def placed_text(whole_config: Any, text: dict[str, Any]) -> PlacedText:
    """A model of several parts, and where its text part is.

    Args:
        text: the config.json of the decoder.

    Raises:
        CheckpointError: transformers cannot build them.
    """
    from transformers import CONFIG_MAPPING  # an extra, and seconds to import
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        with torch.device("meta"):
            own_config = CONFIG_MAPPING[text["model_type"]].from_dict(text)
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(own_config)]
            decoder = model_class(own_config)
            whole = whole_class(whole_config)(whole_config)
        return PlacedText(whole, decoder, places(whole, decoder))
    except Exception as error:
        what = f"transformers cannot build it: {type_and_message(error)}"
        raise CheckpointError(Fault(CONFIG, what)) from error


def places(whole: nn.Module, decoder: nn.Module) -> Places:
    """Where the parts of `decoder` are in `whole`.

    Raises:
        ValueError: the whole model has no head of its own.
    """
    return Places(*_trunk_and_head(whole), *_trunk_and_head(decoder))


def _trunk_and_head(lm: Any) -> tuple[str, str]:
    trunk = lm.get_decoder()
    while trunk.get_decoder() is not trunk:  # of a decoder inside of the model
        trunk = trunk.get_decoder()
    paths = {module: path for path, module in lm.named_modules()}
    head = lm.get_output_embeddings()
    if head not in paths or trunk not in paths:
        raise ValueError(f"{type(lm).__name__} has no decoder with a head")
    return paths[trunk], paths[head]


def whole_class(config: Any) -> Any:
    """transformers' class of a model of several parts.

    Raises:
        CheckpointError: it has none that yields logits.
    """
    from transformers.models.auto import modeling_auto  # an extra, and seconds to import

    tables = (
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    )
    for table in tables:
        if type(config) in table:
            return table[type(config)]
    what = f"{config.model_type}: transformers has no class of it that yields logits"
    raise CheckpointError(Fault(CONFIG, what, fix="the folder of a model of text"))
