"""What a script gives as config, model and data, as the words and values of keys from which a run is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.config.keys import flatten
from weft.config.load import try_load
from weft.config.run import Run
from weft.config.user_code import canonical_reference, is_reference
from weft.errors import Fault, UserError
from weft.models import FAMILIES
from weft.start.given_data import StoredData, store_given


def given_values(config: Any, model: Any, data: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """The words of a command line, and keys with values, that mean the same."""
    words: list[str] = []
    values: dict[str, Any] = {}
    if isinstance(config, (str, Path)):
        words.append(str(config))
    elif isinstance(config, Run):
        values.update(_plain_values(config.model_dump(mode="json")))
    elif isinstance(config, Mapping):
        values.update(_plain_values(config))
    elif config is not None:
        got, need = type(config).__name__, "a TOML file, or keys with values"
        fix = 'for example weft.train({"steps": 10, "optim": {"lr": 1e-3}})'
        raise UserError(Fault("config", "is no config", got=got, need=need, fix=fix))
    if model is not None:
        values["model.name"] = model_name(model)
    if isinstance(data, (str, Path)):
        values["data.source"] = str(data)
    return tuple(words), values


@dataclass(frozen=True)
class GivenRun:
    """A run as a script describes it.

    Attributes:
        words: of a command line.
        values: of keys beside them, without those that name the data.
        data: that the script gives as an object; None: the config names them.
    """

    words: tuple[str, ...]
    values: Mapping[str, Any]
    data: StoredData | None

    @staticmethod
    def of(config: Any, model: Any, data: Any) -> GivenRun:
        """The run of these arguments of `weft.train`; what is given as data is read and written.

        Raises:
            UserError: config or data are none.
        """
        words, values = given_values(config, model, data)
        if data is None or isinstance(data, (str, Path)):
            return GivenRun(words, values, None)
        loaded = try_load(words, FAMILIES, values)
        if loaded.faults:
            raise UserError(*loaded.faults)
        stored = store_given(data, loaded.run)
        keys = {key: value for key, value in stored.keys.items() if key not in values}
        return GivenRun(words, values, replace(stored, keys=keys))

    @property
    def all_values(self) -> dict[str, Any]:
        """Of all keys; the data are where they were written first."""
        return {**self.values, **(self.data.values() if self.data else {})}


def _plain_values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys with values as a TOML file has them; None means the same as leaving a key out."""
    for key, value in flatten(config).items():
        if isinstance(value, os.PathLike):
            yield key, os.fspath(value)
        elif hasattr(value, "item") and not getattr(value, "shape", ()):
            yield key, value.item()  # a scalar of NumPy or torch
        elif value is not None:
            yield key, value


def model_name(model: Any) -> str:
    """The name under which a model is known; a model that is a value is registered."""
    if isinstance(model, (str, Path)):
        name = str(model)
        return canonical_reference(name) if is_reference(name) else name
    if isinstance(model, ModuleType) and getattr(model, "__file__", None):
        return canonical_reference(str(model.__file__))
    from weft.models.user_family import UserFamily  # it imports torch
    from weft.models.user_model import Model, model_of, with_code

    if isinstance(model, Model):
        family = UserFamily(with_code(model))
    else:
        name = getattr(model, "__name__", None) or type(model).__name__
        family = UserFamily(model_of(model, name=name.strip("_")))
    FAMILIES.add(family)
    return family.model.name
