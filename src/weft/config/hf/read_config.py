"""Reads config.json: the family and its fields, or the keys that weft computes differently."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.config.hf.architectures import PREFIX, architectures, scored_architectures
from weft.config.hf.mapping import (
    FIXED_EVERYWHERE,
    IGNORED,
    REQUIRED,
    ConfigFamily,
    ConfigMapping,
    Families,
    Fixed,
    HFMapping,
    Json,
    Key,
    UncomputedSetting,
)
from weft.config.hf.safetensors_files import list_tensors, read_json
from weft.config.hf.text_part import text_config_of
from weft.config.keys import Flat
from weft.errors import CheckpointError, Fault

CONFIG = "config.json"
MAX_NUMBER = 2**40
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class DescribedModel:
    """The model of a Hugging Face folder.

    Attributes:
        family: weft's name.
        fields: of the family's Config, set by the folder.
        suggested: fields that a user may set to another value.
    """

    family: str
    fields: Flat
    suggested: Flat


def describe_folder(folder: Path, families: Families) -> DescribedModel:
    """The model of a folder, from config.json and the names of its tensors.

    Raises:
        CheckpointError: missing files and keys, and keys that weft computes differently; all of
            them at once.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            Fault(
                str(folder),
                "no such folder",
                need=f"a folder with {CONFIG} and safetensors",
                fix="check the path",
            )
        )
    config = text_config_of(read_json(path))
    family, mapping = find_family(config, families, key=str(path))
    faults = tuple(config_faults(config, mapping.config, key=str(path)))
    if faults:
        are_settings = all(isinstance(fault, UncomputedSetting) for fault in faults)
        other = _other_code(config, families) if are_settings else None
        if other is None or not _computes(other[1], faults, config):
            raise CheckpointError(*_with_package(faults))
        family, mapping = other
    return DescribedModel(
        family=family.Config.family,
        fields={**read_fields(config, mapping.config), **_labels(config, mapping)},
        suggested=_probe_tensors(folder, config, mapping.config),
    )


def _labels(config: Json, mapping: HFMapping) -> Flat:
    """The number of labels of a model that scores texts; transformers' default is 2."""
    if _architecture(config) != mapping.scored_architecture:
        return {}
    names = config.get("id2label")
    return {"labels": len(names) if names else config.get("num_labels", 2)}


def uncomputed_settings(config: Json, families: Families) -> tuple[str, ...]:
    """Settings of a config.json that the family of its architecture does not compute, in words."""
    _, mapping = find_family(config, families, key=CONFIG)
    faults = config_faults(config, mapping.config, key=CONFIG)
    return tuple(f"{fault.what} (got {fault.got}; need {fault.need})" for fault in faults)


def _other_code(config: Json, families: Families) -> tuple[ConfigFamily, HFMapping] | None:
    """The family of transformers' own code for a config.json; None where it has none."""
    model_type = config.get("model_type")
    own = architectures().get(str(model_type))
    scored = scored_architectures().get(str(model_type))
    if own is None or _architecture(config) not in (None, own, scored):
        return None
    family = families[f"{PREFIX}{model_type}"]
    assert family.hf is not None, "all of transformers' decoders have a format"
    return family, family.hf


def _computes(other: HFMapping, faults: Iterable[Fault], config: Json) -> bool:
    """Whether transformers' own code computes all that weft's family of this config does not."""
    whole = other.config.whole
    return (
        whole is not None
        and all(isinstance(f, UncomputedSetting) and whole.has_key(f.setting) for f in faults)
        and not any(whole.faults(config, key=CONFIG))
    )


def _with_package(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Faults, with the package whose code may compute those settings where it is not installed."""
    fix = "" if architectures() else "pip install 'weft-train[hf]', whose own code may train it"
    for fault in faults:
        is_setting = isinstance(fault, UncomputedSetting)
        yield replace(fault, fix=fix) if is_setting and not fault.fix else fault


def hf_mappings(families: Families) -> dict[str, HFMapping]:
    """Mappings of the families that transformers has."""
    return {name: family.hf for name, family in families.items() if family.hf is not None}


def find_family(config: Json, families: Families, *, key: str) -> tuple[ConfigFamily, HFMapping]:
    """The family of this config.json, by its architecture, or by its model_type where it names no
    architecture; transformers' own code where weft has no such family.

    Raises:
        CheckpointError: an architecture that no family has, with those that exist.
    """
    model_type = config.get("model_type")
    architecture = _architecture(config)
    mappings = hf_mappings(families)
    for name, mapping in mappings.items():
        if architecture is None:
            is_match = mapping.model_type == model_type
        else:
            is_match = architecture in (mapping.architecture, mapping.scored_architecture)
        if is_match:
            return families[name], mapping
    other = _other_code(config, families)
    if other is not None:
        return other
    got = repr(architecture or model_type)
    known = sorted(mapping.architecture for mapping in mappings.values())
    fix = "name the folder of a supported model (docs/huggingface.md)"
    if not architectures():
        fix = "pip install 'weft-train[hf]', which adds the decoders of transformers"
    raise CheckpointError(
        Fault(key, "unknown architecture", got=got, need=f"one of {', '.join(known)}", fix=fix)
    )


def _architecture(config: Json) -> Any:
    """The first of `architectures`; None where there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    return names[0]


def config_faults(config: Json, mapping: ConfigMapping, *, key: str) -> Iterator[Fault]:
    """Keys that are missing, that weft computes differently, or that it does not know."""
    if mapping.whole is not None:
        yield from mapping.whole.faults(config, key=key)
        return
    fixed = (*mapping.fixed, *FIXED_EVERYWHERE)
    for row in mapping.keys:
        yield from _key_faults(row, config, key=key)
    for rule in mapping.fixed:
        kinds = {type(value) for value in rule.allowed(config)} or {type(config.get(rule.hf_key))}
        for fault in _fixed_faults(rule, config, key=key):
            if type(config[rule.hf_key]) in kinds:
                setting = rule.hf_key
                fault = UncomputedSetting(key, fault.what, fault.got, fault.need, setting=setting)
            yield fault
    for rule in FIXED_EVERYWHERE:
        yield from _fixed_faults(rule, config, key=key)
    if mapping.rope:
        yield from mapping.rope.faults(config, key=key)
    known = set(IGNORED | mapping.ignored)
    known.update(row.hf_key for row in mapping.keys)
    known.update(rule.hf_key for rule in fixed)
    known.update(mapping.rope.hf_keys if mapping.rope else ())
    for name, value in config.items():
        if name not in known and not name.startswith("_") and value is not None:
            fix = f"remove it from {CONFIG} if it changes no logit"
            yield Fault(key, f"{name}: unknown key", got=_short(value), fix=fix)


def read_fields(config: Json, mapping: ConfigMapping) -> Flat:
    """Fields of a family's Config, of a config.json without `config_faults`."""
    if mapping.whole is not None:
        return mapping.whole.fields(config)
    fields: Flat = dict(mapping.implied)
    for row in mapping.keys:
        fields[row.field] = row.read(config)
    if mapping.rope:
        fields.update(mapping.rope.fields(config))
    return fields


def _probe_tensors(folder: Path, config: Json, mapping: ConfigMapping) -> Flat:
    """Fields that follow from the presence of a tensor."""
    if not mapping.probes:
        return {}
    names = list_tensors(folder)
    probes = mapping.probes.items()
    return {field: int(pattern.format_map(config) in names) for field, pattern in probes}


def _key_faults(row: Key, config: Json, *, key: str) -> Iterator[Fault]:
    value = row.read(config)
    if value is None and row.may_be_none:
        return
    if value is REQUIRED or value is None:
        yield Fault(key, f"has no {row.hf_key}", fix="download the file again")
    elif not isinstance(value, int | float):
        yield Fault(
            key, f"{row.hf_key} is no number", got=_short(value), fix="download the file again"
        )
    elif not abs(value) <= MAX_NUMBER:  # NaN as well
        yield Fault(
            key, f"{row.hf_key}: out of range", got=_short(value), fix="download the file again"
        )
    elif row.field == "layers" and value > MAX_LAYERS:
        yield Fault(
            key, f"{row.hf_key}: out of range", got=_short(value), need=f"at most {MAX_LAYERS}"
        )


def _fixed_faults(rule: Fixed, config: Json, *, key: str) -> Iterator[Fault]:
    value = config.get(rule.hf_key)
    allowed = rule.allowed(config)
    if value is None or value in allowed:
        return
    words = [json.dumps(each) for each in allowed]
    need = " or ".join(words) or "nothing"
    yield Fault(key, f"{rule.hf_key}: not what weft computes", got=_short(value), need=need)


def _short(value: Any) -> str:
    if isinstance(value, (str, int, float, list, dict)):
        text = json.dumps(value)
    else:
        text = repr(value)
    if len(text) <= 40:
        return text
    return f"{text[:37]}..."
