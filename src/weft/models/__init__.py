"""Registry of model families: each folder here that has a config.py is one, and each model file of a user. Imports no torch.

config.py   Config, PRESETS, AXES, ties, init; no torch
model.py    blocks, and builders: of single blocks; optional
hf.py       HF: config.json and tensors of Hugging Face folders, both ways; no torch; optional
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.config.hf.architectures import is_architecture_name, model_type_of
from weft.config.hf.mapping import ConfigFamily, HFMapping
from weft.config.user_code import canonical_reference, check_reference, is_reference, trust_named
from weft.core.model_config import AxisTable, InitTable, ModelConfig
from weft.errors import ConfigError, Fault, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from weft.config.schema import ModelSection
    from weft.models.common.lazy_blocks import Builders


class Family(ConfigFamily, Protocol):
    """A model family: its configs, and how a model is built, initialised and sharded."""

    def axes(self, cfg: Any) -> AxisTable:
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

    def axes(self, cfg: Any) -> AxisTable:
        """The table of config.py."""
        return self.AXES

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The chain that model.py builds."""
        model = importlib.import_module(f"{self.package}.model")
        blocks: dict[str, nn.Module] = model.blocks(cfg)
        return blocks

    def builders(self, cfg: Any) -> Builders | None:
        """The builders that model.py names; None where it only has `blocks`."""
        model = importlib.import_module(f"{self.package}.model")
        return _builders_or_none(model, cfg)


def builders_of(family: Family, cfg: Any) -> Builders | None:
    """Builders of the blocks of a family; None where only all blocks can be built."""
    return _builders_or_none(family, cfg)


def _builders_or_none(source: object, cfg: Any) -> Builders | None:
    make_builders: Callable[[Any], Builders | None] | None = getattr(source, "builders", None)
    if make_builders is None:
        return None
    return make_builders(cfg)


def _family_packages() -> Iterator[str]:
    """Packages of this folder that have a config.py."""
    folder = Path(__file__).parent
    for module in pkgutil.iter_modules([str(folder)]):
        if module.ispkg and (folder / module.name / "config.py").is_file():
            yield f"{__name__}.{module.name}"


ENTRY_POINTS = "weft.models"
"""Group of entry points by which installed packages name their models."""


class FamilyRegistry(Mapping[str, Family]):
    """Families by name: those of weft, installed ones (entry points), and users' models by file or
    dotted name, which are imported when they are looked up. Iterates over those of weft.
    """

    def __init__(self, built_in: Mapping[str, Family]) -> None:
        self._built_in = dict(built_in)
        self._of_users: dict[str, Family] = {}

    def __reduce__(self) -> str:
        """Pickled as the name of the one registry: other processes load users' models themselves."""
        return "FAMILIES"

    def __getitem__(self, name: str) -> Family:
        """The family of this name.

        Raises:
            KeyError: there is none.
            ConfigError: the model of a user cannot be used.
        """
        known = self._built_in.get(name) or self._of_users.get(name)
        if known is not None:
            return known
        if is_architecture_name(name):
            return _load_transformers_family(name)
        reference: str | None = name
        key = name
        if is_reference(name):
            key = canonical_reference(name)
            reference = key
        else:
            reference = self._installed(name)
            trust_named(reference)  # its package was installed for this
        if reference is None:
            raise KeyError(name)
        if key not in self._of_users:
            self._of_users[key] = _load_user_family(reference, name=key)
        return self._of_users[key]

    def __contains__(self, name: object) -> bool:
        if name in self._built_in or name in self._of_users:
            return True
        if is_reference(name) or is_architecture_name(name):
            return True
        return isinstance(name, str) and self._installed(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._built_in)

    def __len__(self) -> int:
        return len(self._built_in)

    def add(self, family: Family) -> None:
        """Register a family of this process under its own name; one of the same name is replaced."""
        self._of_users[family.Config.family] = family

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Families that are registered inside the block are forgotten at its end."""
        before = dict(self._of_users)
        try:
            yield
        finally:
            self._of_users = before

    def value_of(self, name: str) -> Any:
        """The model of a user that was given as a value, not as a file; None for any other name."""
        family = self._of_users.get(name)
        model = getattr(family, "model", None)
        if model is None or model.text is not None:
            return None
        return model

    def is_user_model(self, name: str) -> bool:
        """Whether a name belongs to a model of a user."""
        return name not in self._built_in

    @staticmethod
    def _installed(name: str) -> str | None:
        """The module that an entry point names."""
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
            return entry.module
        return None


def _load_user_family(reference: str, *, name: str) -> Family:
    """The family of a user's model; imports torch."""
    check_reference(reference, key="model.name")
    from weft.models.user_family import UserFamily
    from weft.models.user_model import model_of_file

    model = replace(model_of_file(reference), name=name)
    family: Family = UserFamily(model)
    return family


def _load_transformers_family(name: str) -> Family:
    """The family of a decoder of transformers; imports torch once the name is known."""
    model_type_of(name)
    from weft.models.transformers.family import transformers_family

    family: Family = transformers_family(name)
    return family


def _load_families() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for package in _family_packages():
        family = FamilyFolder.load(package)
        families[family.Config.family] = family
    return dict(sorted(families.items()))


def _collect_presets(families: Mapping[str, Family]) -> dict[str, ModelConfig]:
    presets: dict[str, ModelConfig] = {}
    for each in families.values():
        presets.update(each.PRESETS)
    return presets


FAMILIES = FamilyRegistry(_load_families())
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


def model_label(model: ModelSection) -> str:
    """The preset of a model, and whether it has other sizes than that."""
    preset = PRESETS.get(model.preset or "")
    if preset is None or model.architecture == preset.model_dump():
        return model.label
    return f"{model.label} with other sizes"
