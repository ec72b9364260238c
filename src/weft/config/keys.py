"""Dotted keys of a config: flat and nested views, needed values in words, unknown keys and pydantic's errors as faults."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from weft.errors import Fault, did_you_mean

Flat = dict[str, Any]
"""Dotted key -> value: `{"mesh": "dp2", "optim.lr": 0.003}`."""

SPELLINGS: Mapping[str, str] = {"sample.every": "sample_every"}
"""Other spellings of keys: `sample` itself is a number, so no section can have its name."""

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "-n": ("nproc",),
    "batch_size": ("batch.global_size", "batch.micro_size"),
    "learning_rate": ("optim.lr",),
    "max_steps": ("steps",),
    "num_steps": ("steps",),
    "iterations": ("steps",),
    "output_dir": ("out",),
    "sequence_length": ("data.seq_len",),
    "block_size": ("data.seq_len",),
    "dataset": ("data.source",),
    "gpus": ("mesh",),
    "world_size": ("mesh",),
    "simpo_gamma": ("dpo.gamma",),
    "neftune_noise_alpha": ("neftune",),
    "neftune_alpha": ("neftune",),
    "use_dora": ("lora.dora",),
}
"""Names of other programs -> keys with that meaning."""

VALUE_SYNONYMS: Mapping[str, str] = {
    "gpu": "cuda",
    "adam": "adamw",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "bfloat16",
    "float8": "bfloat16",
    "fp64": "float64",
    "ipo": "dpo",
    "simpo": "dpo",
    "orpo": "dpo",
    "kto": "dpo",
}
"""Values of other programs -> the value with that meaning."""
NO_8_BITS = "types of 8 bits are not implemented"
OF_PAIRS = "it is a dpo.loss_type"
REASONS: Mapping[str, str] = {
    "fp8": NO_8_BITS,
    "float8": NO_8_BITS,
    "int8": NO_8_BITS,
    "ipo": OF_PAIRS,
    "simpo": OF_PAIRS,
    "orpo": OF_PAIRS,
    "kto": OF_PAIRS,
}
"""Why a value of other programs has no counterpart here, or where it has one."""


USUAL_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("model.preset", "model.name", "model.from_hf"),
    "data": ("data.source",),
    "optim": ("optim.name", "optim.lr"),
    "precision": ("precision.compute",),
}
"""Keys that are meant where only their section is named."""
MAX_NAMED = 6
"""Keys of a section that a fault names."""


def keys_of(config: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of a config type, sections opened."""
    found: dict[str, FieldInfo] = {}
    for name, field in config.model_fields.items():
        section = section_of(field)
        if section is None:
            found[prefix + name] = field
        else:
            found.update(keys_of(section, f"{prefix}{name}."))
    return found


def table_key(key: str, known: Mapping[str, FieldInfo]) -> str | None:
    """The key whose value is a table of any names, with this key in it: `optim.options.eps` is in
    `optim.options`.
    """
    table = key.rpartition(".")[0]
    if table in known and get_origin(known[table].annotation) is dict:
        return table
    return None


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The type of the section that a field is; None for a plain value."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested sections as dotted keys; lists become tuples."""
    flat: Flat = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            key = prefix + name
            flat[SPELLINGS.get(key, key)] = _as_tuple(value)
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested sections."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        section = nested
        for word in sections:
            section = section.setdefault(word, {})
        section[name] = value
    return nested


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_as_tuple, value))
    if isinstance(value, dict):
        return {name: _as_tuple(item) for name, item in value.items()}
    return value


def plain_types(annotation: Any) -> frozenset[type]:
    """The types of the plain values in an annotation: `tuple[float, float] | None` -> float, NoneType."""
    origin = get_origin(annotation)
    if origin is Literal:
        return frozenset()
    if origin is None:
        return frozenset((annotation,)) if isinstance(annotation, type) else frozenset()
    arguments = get_args(annotation)
    if origin is Annotated:
        arguments = arguments[:1]
    return frozenset[type]().union(*map(plain_types, arguments))


def needs_whole_numbers(annotation: Any) -> bool:
    """Whether numbers of this type are whole, so that 1e3 means 1000."""
    types_of_values = plain_types(annotation)
    return int in types_of_values and float not in types_of_values and str not in types_of_values


def whole_number(value: Any, annotation: Any) -> Any:
    """A float such as 1e3 as an int where the type needs one; any other value as it is."""
    if isinstance(value, float) and value.is_integer() and needs_whole_numbers(annotation):
        return int(value)
    return value


def need(field: FieldInfo) -> str:
    """What a value of this field must be, in words: its title, or `a whole number, at least 1`."""
    return field.title or _need(field.annotation, tuple(field.metadata))


def _need(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        constraints = _constraints(arguments[1:])
        return _need(arguments[0], (*metadata, *constraints))
    if origin in (Union, types.UnionType):
        needs = [_need(choice, metadata) for choice in arguments]
        return ", or ".join(needs)
    if origin is Literal:
        words = [str(choice) for choice in arguments]
        return f"one of {', '.join(words)}"
    if origin is tuple:
        each = _need(arguments[0])
        is_any_length = arguments[1:] == (...,)
        if is_any_length:
            return f"any number of values, each {each}"
        return f"{len(arguments)} values, each {each}"
    name = _TYPE_WORDS.get(annotation, str(annotation))
    return ", ".join((name, *_bounds(metadata)))


def _constraints(extras: Iterable[Any]) -> list[Any]:
    """Constraints in the extra arguments of `Annotated`, those of pydantic's Field opened."""
    return [each for extra in extras for each in getattr(extra, "metadata", [extra])]


_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "nothing",
}
_BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _bounds(metadata: Iterable[Any]) -> list[str]:
    return [
        f"{words} {getattr(constraint, name)}"
        for constraint in metadata
        for name, words in _BOUND_WORDS.items()
        if hasattr(constraint, name)
    ]


def unknown_key(key: str, known: Iterable[str]) -> Fault:
    """The fault of a key that the config does not have, with the key that may be meant."""
    keys = sorted(known)
    inside = [other for other in keys if other.startswith(f"{key}.")]
    if inside:
        usual = [other for other in USUAL_KEYS.get(key, ()) if other in inside] or inside
        shown = ", ".join(f"--{other}" for other in usual[:MAX_NAMED])
        more = ", ..." if len(inside) > len(usual[:MAX_NAMED]) else ""
        fix = f"set one of its keys: {shown}{more}"
        return Fault(key, "is a section, not a value", fix=fix)
    return Fault(key or "--", "unknown key", fix=_nearest_key(key, keys))


def _nearest_key(key: str, keys: list[str]) -> str:
    """The keys that another key may mean: a synonym, one of the same name, or the nearest spelling
    in its section.
    """
    section, _, name = key.rpartition(".")
    meant = [other for other in SYNONYMS.get(name, ()) if other in keys]
    if not meant:
        meant = [other for other in keys if _last_word(other) == name]
    if meant:
        names = " or ".join(repr(other) for other in meant)
        return f"did you mean {names}?"
    siblings = [other for other in keys if other.rpartition(".")[0] == section]
    if siblings:
        return did_you_mean(key, siblings)
    hint = did_you_mean(key, keys)
    if hint.startswith("did"):
        return hint
    return f"{hint}; see --help"


def _last_word(key: str) -> str:
    return key.rpartition(".")[2]


def faults_of(error: ValidationError, known: Mapping[str, FieldInfo]) -> list[Fault]:
    """What pydantic found wrong, one fault a key."""
    found: dict[str, Fault] = {}
    for item in error.errors():
        key = _key_at(item["loc"], known)
        if key not in found:
            found[key] = _fault_of(key, item, known.get(key))
    return list(found.values())


def _key_at(location: tuple[int | str, ...], known: Mapping[str, FieldInfo]) -> str:
    """The dotted key at pydantic's location; the section where no key is named."""
    words = [str(part) for part in location]
    for stop in range(len(words), 0, -1):
        key = ".".join(words[:stop])
        if key in known:
            return key
    return ".".join(words) or "config"


def _fault_of(key: str, item: Any, field: FieldInfo | None) -> Fault:
    kind = item["type"]
    value = item["input"]
    if field is None or kind in ("value_error", "assertion_error"):
        message = item["msg"].removeprefix("Value error, ")
        what, _, remedy = message.partition("; try ")
        return Fault(key, what, fix=f"try {remedy}" if remedy else "")
    if kind == "literal_error" and str(value) in choices(field.annotation):
        fix = f"{value} without quotes"
        return Fault(key, "wrong type", got=repr(value), need=need(field), fix=fix)
    if kind == "literal_error":
        return Fault(
            key,
            _unknown(str(value)),
            got=repr(value),
            need=need(field),
            fix=_nearest_value(str(value), choices(field.annotation)) or example(key, field),
        )
    is_out_of_range = kind.startswith(("greater", "less", "finite"))
    return Fault(
        key,
        "out of range" if is_out_of_range else "wrong type",
        got=repr(value),
        need=need(field),
        fix=example(key, field),
    )


def _unknown(value: str) -> str:
    """What is wrong with a value that is none of a few."""
    reason = REASONS.get(value)
    return f"unknown value: {reason}" if reason else "unknown value"


def _nearest_value(value: str, allowed: list[str]) -> str:
    """The value that may be meant; empty where none is similar, as the need lists all."""
    synonym = VALUE_SYNONYMS.get(value)
    if synonym in allowed:
        return f"did you mean {synonym!r}?"
    hint = did_you_mean(value, allowed)
    return hint if hint.startswith("did") else ""


def example(key: str, field: FieldInfo) -> str:
    """A way to set the key that works: the field's example, or its default."""
    if field.examples:
        return f"--{key} {field.examples[0]}"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        words = " ".join(map(str, default))
    else:
        words = str(default)
    if default is None or not words:
        return f"leave {key} out, or set such a value"
    return f"for example --{key} {words}"


def choices(annotation: Any) -> list[str]:
    """The words that a type allows, where it allows only a few."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return list(map(str, arguments))
    return [word for argument in arguments for word in choices(argument)]
