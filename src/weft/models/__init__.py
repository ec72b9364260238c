"""Registry of model families: each folder here that has a config.py is one. Imports no torch.

config.py   Config, PRESETS, AXES, ties, init; no torch
model.py    blocks, and builders: of single blocks; optional
hf.py       HF: config.json and tensors of Hugging Face folders, both ways; no torch; optional
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.config.hf.mapping import ConfigFamily, HFMapping
from weft.core.model_config import AxisTable, InitTable, ModelConfig
from weft.errors import ConfigError, Fault, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from weft.models.common.lazy_blocks import Builders


class Family(ConfigFamily, Protocol):
    """A model family: its configs, and how a model is built, initialised and sharded."""

    @property
    def AXES(self) -> AxisTable:  # noqa: N802 (a constant of the family)
        """Logical axes of every parameter."""

    def ties(self, cfg: Any) -> dict[str, str]:
        """Tied parameters: alias -> owner."""

    def init(self, cfg: Any) -> InitTable:
        """Starting values of every parameter."""

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The chain of blocks by name, "loss" last; ties are not applied yet."""


@dataclass(frozen=True)
class FamilyFolder:
    """The `Family` in one folder: config.py and hf.py are imported at once, model.py (needs torch)
    when blocks are built.
    """

    package: str
    Config: type[ModelConfig]
    PRESETS: Mapping[str, ModelConfig]
    AXES: AxisTable
    ties: Callable[[Any], dict[str, str]]
    init: Callable[[Any], InitTable]
    hf: HFMapping | None

    @classmethod
    def load(cls, package: str) -> FamilyFolder:
        """The family of a package."""
        config = importlib.import_module(f"{package}.config")
        has_hf = importlib.util.find_spec(f"{package}.hf") is not None
        return cls(
            package=package,
            Config=config.Config,
            PRESETS=config.PRESETS,
            AXES=config.AXES,
            ties=config.ties,
            init=config.init,
            hf=importlib.import_module(f"{package}.hf").HF if has_hf else None,
        )

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The chain that model.py builds."""
        model = importlib.import_module(f"{self.package}.model")
        blocks: dict[str, nn.Module] = model.blocks(cfg)
        return blocks

    def builders(self, cfg: Any) -> Builders | None:
        """The builders that model.py names; None where it only has `blocks`."""
        model = importlib.import_module(f"{self.package}.model")
        make_builders: Callable[[Any], Builders] | None = getattr(model, "builders", None)
        return make_builders(cfg) if make_builders else None


def builders_of(family: Family, cfg: Any) -> Builders | None:
    """Builders of the blocks of a family; None where only all blocks can be built."""
    make_builders: Callable[[Any], Builders | None] | None = getattr(family, "builders", None)
    return make_builders(cfg) if make_builders else None


def _family_packages() -> Iterator[str]:
    """Packages of this folder that have a config.py."""
    folder = Path(__file__).parent
    for module in pkgutil.iter_modules([str(folder)]):
        if module.ispkg and (folder / module.name / "config.py").is_file():
            yield f"{__name__}.{module.name}"


def _load_families() -> dict[str, Family]:
    families = [FamilyFolder.load(package) for package in _family_packages()]
    families.sort(key=lambda family: family.Config.family)
    return {family.Config.family: family for family in families}


def _collect_presets(families: Mapping[str, Family]) -> dict[str, ModelConfig]:
    presets: dict[str, ModelConfig] = {}
    for each in families.values():
        presets.update(each.PRESETS)
    return presets


FAMILIES: Mapping[str, Family] = _load_families()
PRESETS: Mapping[str, ModelConfig] = _collect_presets(FAMILIES)


def family(name: str) -> Family:
    """The family of this name.

    Raises:
        ConfigError: with the nearest name that exists.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    raise ConfigError(
        Fault("model.name", f"unknown model {name!r}", fix=did_you_mean(name, FAMILIES))
    )


def preset(name: str) -> ModelConfig:
    """The published or tiny config of this name; its `family` is the name of its family.

    Raises:
        ConfigError: with the nearest name that exists.
    """
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(
        Fault("model.preset", f"unknown preset {name!r}", fix=did_you_mean(name, PRESETS))
    )
