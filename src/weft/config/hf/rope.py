"""Owns rotary embedding in config.json, old style (`rope_theta`, `rope_scaling`) and new (`rope_parameters`), both ways.

    type       weft                        transformers
    default    factor 1                    no scaling
    llama3     LLaMA's rope_scaling_*      modeling_rope_utils._compute_llama3_parameters
    yarn       DeepSeek's rope_scaling_*   _compute_yarn_parameters; yarn_apply_mscale of DeepSeek-V3 for the scores

All other types (linear, dynamic, longrope, proportional) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.hf.table import Json
from weft.config.keys import Flat
from weft.core.model_config import ModelConfig
from weft.errors import Fault

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys of config.json that are read here."""

THETA = 10_000.0
"""What transformers takes where nothing is said."""

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
WHERE = "original_max_position_embeddings"

_KNOWN: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "llama3": (*LLAMA3, WHERE),
    "yarn": ("factor", *YARN, WHERE, "mscale", "mscale_all_dim", "attention_factor", "truncate"),
}


def parameters_of(config: Json) -> dict[str, Any]:
    """All that config.json says of rotary embedding, in the new style."""
    inner = config.get("rope_scaling") or config.get("rope_parameters") or {}
    found = {key: value for key, value in inner.items() if value is not None and key != "type"}
    theta = config.get("rope_theta") or THETA
    kind = inner.get("rope_type") or inner.get("type") or "default"
    partial, where = (
        {key: config[key]} if config.get(key) is not None else {} for key in ("partial_rotary_factor", WHERE)
    )
    return {"rope_theta": theta} | partial | found | where | {"rope_type": kind}


def faults(config: Json, types: tuple[str, ...], *, key: str) -> Iterator[Fault]:
    """What weft would compute otherwise, or not at all."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            yield Fault(key, f"{name} is no table", repr(config[name]), "a table with rope_type")
            return
    found = parameters_of(config)
    kind = found.pop("rope_type")
    if kind not in types:
        yield Fault(key, "rope scaling is of a type that weft does not compute here", repr(kind), " or ".join(types))
        return
    for name, value in found.items():
        if not isinstance(value, int | float):
            yield Fault(key, f"rope: {name} is no number", repr(value))
        elif name == "partial_rotary_factor":
            if value != 1:
                yield Fault(key, f"rope: {name}: weft rotates whole heads", repr(value), "1")
        elif name not in ("rope_theta", WHERE, *_KNOWN[kind]):
            yield Fault(key, f"rope: {name}: weft does not know it for type {kind!r}", repr(value), "no such key")
    if kind != "yarn":
        return
    if found.get("attention_factor") is not None:
        yield Fault(
            key, "rope: attention_factor: weft takes it from mscale", repr(found["attention_factor"]), "no such key"
        )
    if found.get("truncate") is False:
        yield Fault(key, "rope: truncate: weft rounds YaRN's ramp to whole features", "False", "True, or no such key")
    if not (found.get("factor") or config.get("max_position_embeddings")):
        yield Fault(key, "rope: yarn without factor")
    if found.get("mscale_all_dim") and not found.get("mscale"):
        yield Fault(key, "rope: mscale_all_dim without mscale", need="both")


def fields(config: Json, types: tuple[str, ...]) -> Flat:
    """The Config's fields of a config.json without faults."""
    found = parameters_of(config)
    kind, theta = found["rope_type"], found["rope_theta"]
    if kind == "default":
        return {"rope_theta": theta} | ({"rope_scaling_factor": 1.0} if len(types) > 1 else {})
    longest: int = config.get("max_position_embeddings") or found[WHERE]
    original: int = found.get(WHERE, longest)
    if kind == "llama3":
        scaling = {name: found.get(name, default) for name, default in LLAMA3.items()}
    else:
        scaling = {name: found.get(name) or default for name, default in YARN.items()}
        scaling["factor"] = found.get("factor") or longest / original
        both = bool(found.get("mscale") and found.get("mscale_all_dim"))
        scaling["mscale"], scaling["mscale_all_dim"] = (
            (found["mscale"], found["mscale_all_dim"]) if both else (1.0, 0.0)
        )
    scaling["original_context"] = original
    return {"rope_theta": theta} | {f"rope_scaling_{name}": value for name, value in scaling.items()}


def write(cfg: ModelConfig, types: tuple[str, ...]) -> dict[str, Any]:
    """Keys of config.json, old style: every version of transformers reads it."""
    values = cfg.model_dump()
    theta = {"rope_theta": values["rope_theta"]}
    if values.get("rope_scaling_factor", 1.0) == 1:
        return theta | {"rope_scaling": None}
    kind = types[-1]
    names = LLAMA3 if kind == "llama3" else ("factor", *YARN, "mscale", "mscale_all_dim")
    scaling = {name: values[f"rope_scaling_{name}"] for name in names}
    return theta | {
        "rope_scaling": {"rope_type": kind, **scaling, WHERE: values["rope_scaling_original_context"]},
    }


def unwritable(cfg: ModelConfig) -> Iterator[Fault]:
    """Settings of YaRN that transformers would compute otherwise."""
    values = cfg.model_dump()
    if values.get("rope_scaling_factor", 1.0) == 1 or "rope_scaling_mscale" not in values:
        return
    own, scores = values["rope_scaling_mscale"], values["rope_scaling_mscale_all_dim"]
    if not (own and scores) and (own, scores) != (1.0, 0.0):
        got = f"mscale {own}, mscale_all_dim {scores}"
        yield Fault("model.rope_scaling_mscale", "transformers has no such pair", got, "both above 0, or 1 and 0")
