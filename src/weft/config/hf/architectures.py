"""Which decoders the installed transformers has: model type -> class, read from its table without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from weft.errors import ConfigError, Fault, did_you_mean

KEY = "model.name"
PREFIX = "hf:"
"""Start of the name of a family that is an architecture of transformers: `hf:olmo2`."""
TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
SCORED = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
OLDEST = (5, 8)
"""Of transformers: earlier versions have no interface for experts."""


def is_architecture_name(name: object) -> bool:
    """Whether a name of a family is one of transformers' architectures, known or not."""
    return isinstance(name, str) and name.startswith(PREFIX)


def model_type_of(name: str) -> str:
    """The model type that `hf:olmo2` names.

    Raises:
        ConfigError: transformers is missing, or has no such decoder.
    """
    known = architectures()
    if not known:
        fix = "pip install 'weft-train[hf]'"
        raise ConfigError(Fault(KEY, "needs transformers 5.8 or newer", got=repr(name), fix=fix))
    model_type = name.removeprefix(PREFIX)
    if model_type not in known:
        names = [f"{PREFIX}{each}" for each in known]
        what = (
            "is no decoder of transformers (encoders, encoder-decoders and images have no family)"
        )
        raise ConfigError(Fault(KEY, what, got=repr(name), fix=did_you_mean(name, names)))
    return model_type


@functools.cache
def architectures() -> Mapping[str, str]:
    """Decoders of transformers: model type -> class; empty where it is not installed, or too old."""
    return _table(TABLE)


@functools.cache
def scored_architectures() -> Mapping[str, str]:
    """Those of transformers' models that score texts: model type -> class."""
    return _table(SCORED)


def _table(name: str) -> Mapping[str, str]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None or _version(Path(spec.origin)) < OLDEST:
        return {}
    file = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    for statement in ast.parse(file.read_bytes()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            (pairs,) = statement.value.args  # type: ignore[attr-defined]  # OrderedDict([...])
            return dict(ast.literal_eval(pairs))
    return {}


def _version(package: Path) -> tuple[int, ...]:
    """The first two numbers of a version, as the `__init__.py` of a package says it: a checkout on
    PYTHONPATH has no other record of it.
    """
    found = re.search(r'^__version__ = "(\d+)\.(\d+)', package.read_text("utf-8"), re.MULTILINE)
    return tuple(map(int, found.groups())) if found else ()
