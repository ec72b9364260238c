"""What a script gives as config, model and data, as the words and values of keys from which a run is read."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from numbers import Number
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.config.keys import flatten
from weft.config.run import Run
from weft.config.user_code import canonical_reference, is_reference
from weft.errors import Fault, UserError, first_line
from weft.models import FAMILIES

TOKENS = "tokens.bin"
"""File of a run folder with the tokens that were given as an array."""
MAX_TOKENS = 2**32
"""Tokens are stored in at most four bytes."""


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
    elif data is not None:
        _check_tokens(data)
    return tuple(words), values


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


def _check_tokens(data: Any) -> None:
    """An array of tokens has one dimension and whole numbers."""
    import numpy as np

    if not _is_array(data):  # NumPy takes any other object for a sequence, maybe one without an end
        raise UserError(_no_data(type(data).__name__))
    try:
        tokens = np.asarray(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(_no_data(f"{type(data).__name__}: {first_line(error)}")) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise UserError(_no_data(f"shape {list(tokens.shape)} of {tokens.dtype}"))
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= MAX_TOKENS:
        got = f"{least} to {most}"
        raise UserError(
            Fault("data", "has numbers that are no tokens", got=got, need="0 or more, below 2**32")
        )


def _is_array(data: Any) -> bool:
    """Whether an object is an array, a tensor, or a list, tuple or range of numbers."""
    if isinstance(data, (list, tuple)):
        return all(isinstance(each, Number) or hasattr(each, "__array__") for each in data)
    return isinstance(data, (range, array)) or hasattr(data, "__array__")


def _no_data(got: str) -> Fault:
    need = "a data source, or tokens: an array, tensor or list of whole numbers in one dimension"
    return Fault("data", "is no data", got=got, need=need)


def stored_tokens(tokens: Any, out: Path) -> dict[str, Any]:
    """Write tokens to a file in the run folder; the keys that name it."""
    import numpy as np

    stored = np.asarray(tokens)
    dtype = "uint16" if int(stored.max()) < 2**16 else "uint32"
    out.mkdir(parents=True, exist_ok=True)
    path = out / TOKENS
    stored.astype(dtype).tofile(path)
    return {"data.source": str(path), "data.token_dtype": dtype}
