"""Checks of parameter groups before ranks start, by the names of the model's parameters."""

from __future__ import annotations

from weft.config.schema import LoraConfig, ModelSection, OptimConfig
from weft.errors import ConfigError, Fault
from weft.models import FAMILIES
from weft.models.common.init import named_parameters
from weft.models.common.lora import adapted
from weft.train.init_from import lazy_blocks
from weft.train.optimizers.groups import group_names, make_rule, unmatched_groups


def group_faults(optim: OptimConfig, model: ModelSection, lora: LoraConfig) -> tuple[Fault, ...]:
    """What is wrong with groups of parameters: patterns that match nothing, optimizers that do not
    fit a parameter.
    """
    shapes = trained_shapes(model, lora)
    unmatched = unmatched_groups(optim, shapes)
    if unmatched:
        return unmatched
    try:
        for settings in group_names(optim, shapes, decay_names=()):
            make_rule(optim, settings)
    except ConfigError as error:
        return error.faults
    return ()


def trained_shapes(model: ModelSection, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of the parameters that a run trains, in the order of the model."""
    family = adapted(FAMILIES[model.name], lora)
    ties = family.ties(model)
    found = {}
    for name, param in named_parameters(lazy_blocks(family, model)).items():
        if name not in ties and param.requires_grad:
            found[name] = tuple(param.shape)
    return found
