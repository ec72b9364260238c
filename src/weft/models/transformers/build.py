"""Builds a model of transformers from the fields of a weft config, without drop-out."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import nn

from weft.errors import ConfigError, Fault, PlanError, did_you_mean, type_and_message
from weft.models.transformers.capture import Captured, capture
from weft.models.transformers.interfaces import NAME, register
from weft.models.transformers.sizes import (
    PREFIX,
    SETTINGS,
    SIZES,
    TINY,
    TOKENS,
    fields_of,
    is_drop_out,
)

KEY = "model.name"
EAGER = "eager"
"""Implementation of models whose layers do not call the attention interface."""


def architectures() -> dict[str, str]:
    """Decoders of transformers: model type -> class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@functools.lru_cache(maxsize=64)
def default_config(model_type: str) -> Any:
    """A config of transformers with its own defaults.

    Raises:
        ConfigError: there is no such decoder.
    """
    from transformers import AutoConfig

    known = architectures()
    if model_type not in known:
        names = [f"{PREFIX}{name}" for name in known]
        fix = did_you_mean(f"{PREFIX}{model_type}", names)
        fault = Fault(KEY, "is no decoder of transformers", got=repr(PREFIX + model_type), fix=fix)
        raise ConfigError(fault)
    return AutoConfig.for_model(model_type)


def config_of(model_type: str, values: dict[str, Any]) -> Any:
    """The config of transformers of these sizes and settings; drop-out is 0.

    Raises:
        PlanError: transformers rejects it.
    """
    default = default_config(model_type)
    attributes = dict(fields_of(default))
    settings = json.loads(values.get(SETTINGS) or "{}")
    given: dict[str, Any] = dict(settings)
    if not settings:
        given.update({name: value for name, value in TINY.items() if hasattr(default, name)})
        given.update({name: None for name in TOKENS if hasattr(default, name)})
    for field, attribute in attributes.items():
        given[attribute] = values[field]
    every = {**default.to_dict(), **given}
    given.update({name: type(value)(0) for name, value in every.items() if is_drop_out(name, value)})
    try:
        made = type(default)(**given)
    except Exception as error:
        what = f"{PREFIX}{model_type}: transformers rejects the config: {type_and_message(error)}"
        raise PlanError(Fault(KEY, what, fix="other sizes")) from error
    return made


def build(config: Any, *, implementation: str = NAME) -> nn.Module:
    """A model with the initial values of transformers, on torch's current device."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    register()
    own = type(config).from_dict(config.to_dict())
    own._attn_implementation_internal = implementation
    own._experts_implementation_internal = NAME if implementation in (NAME, EAGER) else EAGER
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    lm: nn.Module = model_class(own)
    return lm


def captured_of(config: Any, num_layers: int) -> Captured:
    """The structure of the models of a config."""
    text = json.dumps(config.to_dict(), sort_keys=True)
    return _captured(type(config).model_type, text, num_layers)


@functools.lru_cache(maxsize=64)
def _captured(model_type: str, text: str, num_layers: int) -> Captured:
    """With weft's attention; with transformers' eager code where layers do not call the interface."""
    config = type(default_config(model_type)).from_dict(json.loads(text))
    try:
        found = _run(config, NAME, num_layers)
    except PlanError as error:
        try:
            return _run(config, EAGER, num_layers)
        except PlanError:
            raise error from None
    return found if found.attentions else _run(config, EAGER, num_layers)


def _run(config: Any, implementation: str, num_layers: int) -> Captured:
    with torch.device("meta"):
        lm = build(config, implementation=implementation)
    return capture(lm, num_layers, implementation=implementation)
