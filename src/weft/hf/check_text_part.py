"""Whether the decoder that weft trains computes what a model of several parts does with texts: logits at tiny sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.config.hf.architectures import PREFIX
from weft.config.hf.read_config import CONFIG
from weft.errors import CheckpointError, Fault, type_and_message
from weft.hf.text_places import Places, places, whole_class
from weft.models.transformers.build import default_config, fitted
from weft.models.transformers.check import LENGTH, MOST_LAYERS, NOISE, ROWS, SEED, TOLERANCE
from weft.models.transformers.interfaces import EAGER
from weft.models.transformers.sizes import SIZES, TOKENS, fields_of

KEPT = ("head_size", "max_seq_len")
"""Sizes that stay as they are: rotary positions are split by entries of a head."""
FIX = "the folder of a model of text (docs/huggingface.md)"


def check_text_part(whole_config: Any, text: dict[str, Any]) -> str:
    """Reject a text part whose decoder computes other logits; a note where it could not be told.

    Args:
        text: the config.json of the decoder.

    Raises:
        CheckpointError: with the difference.
    """
    model_type = text["model_type"]
    is_own = whole_config.get_text_config(decoder=True).model_type == model_type
    try:
        right, found = _both_logits(whole_config, text)
    except Exception as error:
        what = f"not compared with {whole_config.model_type}: {type_and_message(error)}"
        if is_own:
            return what
        raise CheckpointError(Fault(CONFIG, what, fix=FIX)) from error
    difference = float((found - right).abs().max() / right.abs().max())
    if not difference <= TOLERANCE:
        what = (
            f"{whole_config.model_type} computes other logits of a text than {PREFIX}{model_type}"
        )
        got = f"{difference:.1e} of the largest logit"
        raise CheckpointError(Fault(CONFIG, what, got=got, fix=FIX))
    return ""


@torch.no_grad()
def _both_logits(whole_config: Any, text: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of the whole model, without memory but for its text part, and of the decoder, with the same values."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # an extra, and slow to import

    auto_model: Any = AutoModelForCausalLM
    model_type = text["model_type"]
    own = whole_config.get_text_config(decoder=True)
    parts = {name: getattr(whole_config, name, None) for name in type(whole_config).sub_configs}
    name = next(name for name, part in parts.items() if part is own)
    own_tiny = type(own).from_dict(_shrunk(own.to_dict(), model_type))
    tiny = type(whole_config).from_dict({**whole_config.to_dict(), name: own_tiny.to_dict()})
    config = CONFIG_MAPPING[model_type].from_dict(_shrunk(text, model_type))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        # eager: what weft is compared with (models/transformers/check.py)
        decoder = auto_model.from_config(config, attn_implementation=EAGER).eval()
        for param in {id(param): param for param in decoder.parameters()}.values():
            param.add_(torch.randn_like(param), alpha=NOISE)
        with torch.device("meta"):
            whole: Any = whole_class(tiny)(tiny)
        at = places(whole, decoder)
        _give_values(whole, decoder, at)
        tokens = torch.randint(config.vocab_size, (ROWS, LENGTH))
        right = whole.eval()(input_ids=tokens, use_cache=False).logits
        return right, decoder(input_ids=tokens, use_cache=False).logits


def _give_values(whole: nn.Module, decoder: nn.Module, at: Places) -> None:
    """Replace the text part of a model without memory by one with the decoder's values."""
    without = whole.get_submodule(at.trunk)
    trunk = type(without)(without.config).eval()
    trunk.load_state_dict(decoder.get_submodule(at.own_trunk).state_dict())
    for path, module in ((at.trunk, trunk), (at.head, decoder.get_submodule(at.own_head))):
        parent, _, name = path.rpartition(".")
        setattr(whole.get_submodule(parent), name, module)


def _shrunk(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """A config of small sizes with all other settings."""
    fields = dict(fields_of(default_config(model_type)))
    found = dict(config)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for field, name in fields.items():
        if field not in KEPT and config.get(name) is not None:
            found[name] = SIZES[field].tiny
    found[fields["dim"]] = head_size * SIZES["heads"].tiny
    found[fields["layers"]] = min(config[fields["layers"]], MOST_LAYERS)
    found = fitted(found, found[fields["layers"]])
    return {name: 0 if name in TOKENS and value else value for name, value in found.items()}
