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
ARRAYS = "arrays"
"""Folder of a run folder with the named arrays that were given, one .npy file each."""
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
        _check_data(data)
        if isinstance(data, Mapping) or _is_dataset(data):
            _check_reads_arrays(values.get("model.name"), has_file=bool(words))
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


def _check_data(data: Any) -> None:
    """Tokens, or arrays by name, or samples of such arrays; their shapes are checked where they are
    stored.
    """
    if isinstance(data, Mapping):
        for name, array in data.items():
            if not isinstance(name, str) or not name.isidentifier() or not _has_numbers(array):
                got = f"{name!r}: {type(array).__name__}"
                need = "names with arrays or tensors on the CPU, of one row a sample"
                raise UserError(Fault("data", "is no mapping of arrays", got=got, need=need))
    elif not _is_dataset(data):
        _check_tokens(data)


def _has_numbers(array: Any) -> bool:
    """Whether NumPy reads an object as an array of numbers; tensors of other devices and those that
    need gradients are none.
    """
    import numpy as np

    try:
        return hasattr(array, "__array__") and np.asarray(array).dtype.kind in "biuf"
    except (TypeError, ValueError, RuntimeError):
        return False


def _check_reads_arrays(name: str | None, *, has_file: bool) -> None:
    """Only models that name their arrays read arrays by name; what a file names is not looked at here."""
    if name is None and has_file:
        return
    kind = "tokens" if name is None else FAMILIES[name].Config.kind
    if kind != "arrays":
        what = f"gives arrays by name, and the model reads {kind}"
        fix = "name them in INPUTS of the model: see docs/your-model.md"
        raise UserError(Fault("data", what, fix=fix))


def _is_dataset(data: Any) -> bool:
    """Whether an object is a map-style dataset, such as torch's: numbered samples, each a dict."""
    is_sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not is_sized or _is_array(data) or isinstance(data, (str, bytes)):
        return False
    return len(data) > 0 and isinstance(data[0], Mapping)


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
    need = (
        "a data source; tokens: an array, tensor or list of whole numbers in one dimension; or arrays "
        "by name, or a dataset of samples that are dicts of arrays"
    )
    return Fault("data", "is no data", got=got, need=need)


def stored_data(data: Any, out: Path) -> dict[str, Any]:
    """Write tokens, or arrays by name, into the run folder; the keys that name them.

    Raises:
        UserError: the samples of a dataset have arrays of different names, shapes or types.
    """
    import numpy as np

    if isinstance(data, Mapping):
        folder = out / ARRAYS
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in data.items():
            np.save(folder / f"{name}.npy", np.asarray(array))
        return {"data.source": str(folder)}
    if _is_dataset(data):
        return _stored_samples(data, out / ARRAYS)
    return _stored_tokens(data, out)


def _stored_samples(dataset: Any, folder: Path) -> dict[str, Any]:
    """Write the samples of a dataset one after the other, each into its row of an .npy file."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    first = {name: np.asarray(value) for name, value in dataset[0].items()}
    rows: dict[str, Any] = {}
    for name, value in first.items():
        shape = (len(dataset), *value.shape)
        path = folder / f"{name}.npy"
        rows[name] = np.lib.format.open_memmap(path, "w+", dtype=value.dtype, shape=shape)
    for number in range(len(dataset)):
        sample = {name: np.asarray(value) for name, value in dataset[number].items()}
        for name, value in sample.items():
            like = first.get(name)
            if like is None or value.shape != like.shape or value.dtype != like.dtype:
                got = f"{name} {value.dtype} {list(value.shape)}"
                need = ", ".join(
                    f"{key} {one.dtype} {list(one.shape)}" for key, one in first.items()
                )
                what = f"sample {number} of the dataset has another array than sample 0"
                raise UserError(Fault("data", what, got=got, need=need, fix="pad it to one shape"))
            rows[name][number] = value
        if len(sample) < len(first):
            missing = ", ".join(name for name in first if name not in sample)
            what = f"sample {number} of the dataset lacks {missing}"
            raise UserError(Fault("data", what, fix="give every sample the same arrays"))
    for written in rows.values():
        written.flush()
    return {"data.source": str(folder)}


def _stored_tokens(tokens: Any, out: Path) -> dict[str, Any]:
    import numpy as np

    stored = np.asarray(tokens)
    dtype = "uint16" if int(stored.max()) < 2**16 else "uint32"
    out.mkdir(parents=True, exist_ok=True)
    path = out / TOKENS
    stored.astype(dtype).tofile(path)
    return {"data.source": str(path), "data.token_dtype": dtype}
