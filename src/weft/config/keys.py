"""Owns the flat view of a config: dotted keys, what each one needs in words, and pydantic's errors as faults."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from weft.errors import Fault, did_you_mean

Flat = dict[str, Any]
"""Dotted key -> value: `{"mesh": "dp2", "optim.lr": 0.003}`."""


def keys_of(config: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of a config type, tables opened."""
    found: dict[str, FieldInfo] = {}
    for name, field in config.model_fields.items():
        table = table_of(field)
        found |= keys_of(table, f"{prefix}{name}.") if table else {prefix + name: field}
    return found


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The type of the table that a field is; None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested tables as dotted keys; lists become tuples."""
    flat: Flat = {}
    for name, value in nested.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: _frozen(value)}
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        table = nested
        for word in tables:
            table = table.setdefault(word, {})
        table[name] = value
    return nested


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def need(field: FieldInfo) -> str:
    """What a value of this field must be, in words: `a whole number, at least 1`."""
    return _need(field.annotation, tuple(field.metadata))


def _need(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        field_metadata = [getattr(item, "metadata", [item]) for item in arguments[1:]]
        return _need(arguments[0], (*metadata, *(item for items in field_metadata for item in items)))
    if origin in (Union, types.UnionType):
        return ", or ".join(_need(choice, metadata) for choice in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and arguments[1:] == (...,):
        return f"any number of values, each {_need(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} values, each {_need(arguments[0])}"
    return ", ".join((_WORDS.get(annotation, str(annotation)), *_bounds(metadata)))


_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "nothing"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _bounds(metadata: Iterable[Any]) -> list[str]:
    pairs = ((item, name) for item in metadata for name in _BOUNDS if hasattr(item, name))
    return [f"{_BOUNDS[name]} {getattr(item, name)}" for item, name in pairs]


def unknown_key(key: str, known: Iterable[str]) -> Fault:
    """The fault of a key that the config does not have; a table's key is looked for in its own table first."""
    keys = set(known)
    table, _, name = key.rpartition(".")
    siblings = {other for other in keys if other.rpartition(".")[0] == table}
    namesakes = {other for other in keys if other.rpartition(".")[2] == name}
    if any(other.startswith(f"{key}.") for other in keys):
        inside = sorted(other for other in keys if other.startswith(f"{key}."))
        return Fault(key, "is a table, not a value", fix=f"set one of its keys: {', '.join(inside)}")
    if namesakes:
        return Fault(key, "unknown key", fix=" or ".join(f"did you mean {other!r}?" for other in sorted(namesakes)))
    hint = did_you_mean(key, siblings or keys)
    return Fault(key, "unknown key", fix=hint if siblings or hint.startswith("did") else f"{hint}; see --help")


def faults_of(error: ValidationError, known: Mapping[str, FieldInfo]) -> list[Fault]:
    """What pydantic found wrong, one fault a key."""
    found: dict[str, Fault] = {}
    for item in error.errors():
        key = _key_at(item["loc"], known)
        found.setdefault(key, _fault_of(key, item, known.get(key)))
    return list(found.values())


def _key_at(location: tuple[int | str, ...], known: Mapping[str, FieldInfo]) -> str:
    """The dotted key that pydantic's location lies in; the table where no key is named."""
    for stop in range(len(location), 0, -1):
        key = ".".join(map(str, location[:stop]))
        if key in known:
            return key
    return ".".join(str(part) for part in location) or "config"


def _fault_of(key: str, item: Any, field: FieldInfo | None) -> Fault:
    kind = item["type"]
    if field is None or kind in ("value_error", "assertion_error"):
        what, _, mend = item["msg"].removeprefix("Value error, ").partition("; try ")
        return Fault(key, what, fix=f"try {mend}" if mend else "")
    got = repr(item["input"])
    if kind == "literal_error":
        hint = did_you_mean(str(item["input"]), choices(field.annotation))
        return Fault(key, "unknown value", got, need(field), hint)
    what = "out of range" if kind.startswith(("greater", "less", "finite")) else "wrong type"
    return Fault(key, what, got, need(field), example(key, field))


def example(key: str, field: FieldInfo) -> str:
    """A way to set the key that works: its default."""
    default = field.get_default(call_default_factory=True)
    words = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"for example --{key} {words}" if words and default is not None else f"leave {key} out, or set such a value"


def choices(annotation: Any) -> list[str]:
    """The words that a type allows, where it allows but a few."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return list(map(str, arguments))
    return [choice for argument in arguments for choice in choices(argument)]
