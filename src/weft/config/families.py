"""Which model a config chooses: family, preset, and the `Run` type whose `model` section has the family's fields."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from weft.config.hf.mapping import ConfigFamily, Families
from weft.config.keys import Flat
from weft.config.run import Run
from weft.config.schema import ModelSection
from weft.core.model_config import ModelConfig
from weft.errors import ConfigError, Fault, did_you_mean

DEFAULT_PRESET = "llama3-tiny"
MAX_PRESETS = 3
"""Presets that a fault names."""


@dataclass(frozen=True)
class ModelChoice:
    """The model that a config chooses.

    Attributes:
        name: the family.
        preset: one of its presets; None where none equals its defaults.
        keeps_file: whether the model fields of the config file count: the flags chose no other
            model.
    """

    name: str
    preset: str | None
    keeps_file: bool = True


def default_model(families: Families) -> ModelChoice:
    """The model where none is named."""
    return ModelChoice(_family_of(DEFAULT_PRESET, families), DEFAULT_PRESET)


def choose_model(file: Flat, flags: Flat, families: Families) -> ModelChoice:
    """The model that the file names, then the flags.

    Raises:
        ConfigError: an unknown family or preset, or a preset of another family.
    """
    of_file = _after(default_model(families), file, families)
    chosen = _after(of_file, flags, families)
    same_preset = file.get("model.preset") in (None, chosen.preset)
    keeps_file = chosen.name == of_file.name and same_preset
    return ModelChoice(name=chosen.name, preset=chosen.preset, keeps_file=keeps_file)


def _after(before: ModelChoice, layer: Flat, families: Families) -> ModelChoice:
    """The choice after one more layer of keys."""
    name: Any = layer.get("model.name")
    preset = layer.get("model.preset")
    if name is not None and name not in families:
        raise ConfigError(
            Fault(
                "model.name",
                "unknown model",
                got=repr(name),
                fix=_nearest_model(str(name), families),
            )
        )
    if preset is None:
        same_family = name in (None, before.name)
        if same_family:
            return before
        return ModelChoice(name=name, preset=_preset_of_defaults(families[name]))
    family = _family_of(preset, families)
    if name not in (None, family):
        fix = f"use {family!r}, or one of {', '.join(families[name].PRESETS)}"
        raise ConfigError(
            Fault(
                "model.preset",
                f"is a preset of {family!r}",
                got=repr(preset),
                need=f"one of {name!r}",
                fix=fix,
            )
        )
    return ModelChoice(family, preset)


def _nearest_model(name: str, families: Families) -> str:
    """The family that an unknown name may mean, or presets where it is nearer to these: `llama-7b`."""
    presets = [preset for family in families.values() for preset in family.PRESETS]
    (nearest, *_) = difflib.get_close_matches(name, [*families, *presets], n=1, cutoff=0.6) or [""]
    if nearest in presets:
        return f"did you mean --model.preset {_nearest_presets(name, presets)}?"
    return did_you_mean(name, families)


def _nearest_presets(text: str, presets: Iterable[str]) -> str:
    """Up to three presets of similar names, those of the nearest size first: `llama3-8b or
    llama3-3b`; empty where none is similar.
    """
    names = sorted(presets)
    near = difflib.get_close_matches(text, names, n=len(names), cutoff=0.6)
    asked = _billions(text)
    if asked:
        near.sort(key=lambda name: abs(math.log((_billions(name) or math.inf) / asked)))
    return " or ".join(near[:MAX_PRESETS])


def _billions(preset: str) -> float | None:
    """Billions of parameters in the name of a preset; None where it has none.

    >>> _billions("llama3-8b"), _billions("llama3-tiny")
    (8.0, None)
    """
    found = re.search(r"(\d+(?:\.\d+)?)([bm])\b", preset)
    if found is None:
        return None
    number, unit = found.groups()
    if unit == "b":
        return float(number)
    return float(number) / 1000


def _family_of(preset: Any, families: Families) -> str:
    """The family that has this preset."""
    owners = {each: name for name, family in families.items() for each in family.PRESETS}
    if preset not in owners:
        near = _nearest_presets(str(preset), owners)
        if near:
            fix = f"did you mean {near}?"
        else:
            fix = did_you_mean(str(preset), owners)
        raise ConfigError(Fault("model.preset", "unknown preset", got=repr(preset), fix=fix))
    return owners[preset]


def _preset_of_defaults(family: ConfigFamily) -> str | None:
    """The preset that equals the defaults of the family's fields."""
    default = family.Config()
    for name, preset in family.PRESETS.items():
        if preset == default:
            return name
    return None


def preset_fields(chosen: ModelChoice, families: Families) -> Flat:
    """The fields that a preset sets, by dotted key."""
    family = families[chosen.name]
    if chosen.preset:
        config = family.PRESETS[chosen.preset]
    else:
        config = family.Config()
    return {f"model.{name}": getattr(config, name) for name in type(config).model_fields}


@cache
def run_type(name: str, config: type[ModelConfig]) -> type[Run]:
    """`Run` with the family's own fields in its `model` section; equal arguments give the same
    type.
    """
    description = ModelSection.model_fields["name"].description
    name_field: Any = (str, Field(name, description=description))
    model = create_model(
        f"{Path(name).stem.title()}Model", __base__=(config, ModelSection), name=name_field
    )
    section: Any = (model, Field(default_factory=model, description=f"the model: {name}"))
    return create_model("Run", __base__=Run, model=section)
