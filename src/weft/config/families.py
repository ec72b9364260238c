"""Owns how the `model` table gets its keys: the family and preset that are asked for, the Run type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from pydantic import Field, create_model

from weft.config.hf.mapping import HFMapping
from weft.config.keys import Flat
from weft.config.run import Run
from weft.config.schema import ModelSection
from weft.core.model_config import ModelConfig
from weft.errors import ConfigError, Fault, did_you_mean

DEFAULT_PRESET = "llama3-tiny"


class ConfigFamily(Protocol):
    """The config side of a model family; `weft.models.Family` extends it by the model side."""

    @property
    def Config(self) -> type[ModelConfig]:  # noqa: N802 (a class: the family's own type)
        """Type of the family's fields."""

    @property
    def PRESETS(self) -> Mapping[str, ModelConfig]:  # noqa: N802 (a constant of the module)
        """Named sizes."""

    @property
    def hf(self) -> HFMapping | None:
        """Hugging Face's format; None: transformers has no such family."""


Families = Mapping[str, ConfigFamily]


@dataclass(frozen=True)
class Pick:
    """A family, and one of its presets: None where none equals its defaults.

    `keeps_file`: the model fields of the config file still count, as the flags did not choose another model.
    """

    name: str
    preset: str | None
    keeps_file: bool = True


def default_pick(families: Families) -> Pick:
    """The model when nobody asks for one."""
    return Pick(_owner(DEFAULT_PRESET, families), DEFAULT_PRESET)


def pick(file: Flat, flags: Flat, families: Families) -> Pick:
    """The model that the file and then the flags ask for.

    Raises:
        ConfigError: an unknown family or preset, or one that is not the other's.
    """
    of_file = _after(default_pick(families), file, families)
    chosen = _after(of_file, flags, families)
    keeps = chosen.name == of_file.name and file.get("model.preset") in (None, chosen.preset)
    return Pick(chosen.name, chosen.preset, keeps_file=keeps)


def _after(before: Pick, layer: Flat, families: Families) -> Pick:
    name, preset = layer.get("model.name"), layer.get("model.preset")
    if name is not None and name not in families:
        raise ConfigError(Fault("model.name", "unknown model", repr(name), fix=did_you_mean(str(name), families)))
    if preset is None:
        return before if name in (None, before.name) else Pick(name, _tiny(families[name]))
    owner = _owner(preset, families)
    if name not in (None, owner):
        fix = f"use {owner!r}, or one of {', '.join(families[name].PRESETS)}"
        raise ConfigError(Fault("model.preset", f"is a preset of {owner!r}", repr(preset), f"one of {name!r}", fix))
    return Pick(owner, preset)


def _owner(preset: Any, families: Families) -> str:
    presets = {each: name for name, family in families.items() for each in family.PRESETS}
    if preset not in presets:
        raise ConfigError(Fault("model.preset", "unknown preset", repr(preset), fix=did_you_mean(str(preset), presets)))
    return presets[preset]


def _tiny(family: ConfigFamily) -> str | None:
    """The preset that the defaults of the family's fields are."""
    default = family.Config()
    return next((name for name, preset in family.PRESETS.items() if preset == default), None)


def preset_fields(chosen: Pick, families: Families) -> Flat:
    """The fields that a preset sets, by dotted key."""
    family = families[chosen.name]
    config = family.PRESETS[chosen.preset] if chosen.preset else family.Config()
    return {f"model.{name}": getattr(config, name) for name in type(config).model_fields}


@cache
def run_type(name: str, config: type[ModelConfig]) -> type[Run]:
    """`Run` with the family's own fields in its `model` table; equal arguments give the same type."""
    own_name: Any = (str, Field(name, description="model family"))
    model = create_model(f"{name.title()}Model", __base__=(config, ModelSection), name=own_name)
    table: Any = (model, Field(default_factory=model, description=f"the model: {name}"))
    return create_model("Run", __base__=Run, model=table)
