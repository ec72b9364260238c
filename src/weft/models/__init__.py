"""Owns the registry: every file of this folder that is no part of one is a family of models. Imports no torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from weft.core.model_config import AxisTable, InitTable, ModelConfig
from weft.errors import ConfigError, Fault, did_you_mean

if TYPE_CHECKING:
    from torch import nn

_PARTS = ("common",)


class Family(Protocol):
    """What a file models/x.py offers."""

    Config: type[ModelConfig]
    PRESETS: Mapping[str, ModelConfig]
    AXES: AxisTable

    def ties(self, cfg: Any) -> dict[str, str]: ...
    def init(self, cfg: Any) -> InitTable: ...
    def blocks(self, cfg: Any) -> dict[str, nn.Module]: ...


_MODULES = (
    importlib.import_module(f"{__name__}.{name}")
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in _PARTS
)

FAMILIES: Mapping[str, Family] = {module.Config.family: cast(Family, module) for module in _MODULES}

PRESETS: Mapping[str, ModelConfig] = {
    name: config for module in FAMILIES.values() for name, config in module.PRESETS.items()
}


def family(name: str) -> Family:
    """The family of this name.

    Raises:
        ConfigError: with the nearest name that exists.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    raise ConfigError(Fault("model.name", f"unknown model {name!r}", fix=did_you_mean(name, FAMILIES)))


def preset(name: str) -> ModelConfig:
    """The published or tiny config of this name; its `family` says which file it belongs to.

    Raises:
        ConfigError: with the nearest name that exists.
    """
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(Fault("model.preset", f"unknown preset {name!r}", fix=did_you_mean(name, PRESETS)))
