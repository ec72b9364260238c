"""Rotary embedding in config.json, old style (`rope_theta`, `rope_scaling`) and new (`rope_parameters`), both ways.

    type       weft                        transformers
    default    no rope_scaling, factor 1   no scaling
    linear     rope_scaling                modeling_rope_utils._compute_linear_scaling_rope_parameters
    dynamic    rope_scaling                _compute_dynamic_ntk_parameters, within the model's context
    llama3     LLaMA's rope_scaling_*,     _compute_llama3_parameters
               rope_scaling of others
    yarn       DeepSeek's rope_scaling_*,  _compute_yarn_parameters; yarn_apply_mscale of DeepSeek-V3 for the scores
               rope_scaling of others

All other types (longrope, proportional) are trained by transformers' own code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from weft.config.hf.mapping import Json, UncomputedSetting
from weft.config.keys import Flat
from weft.core.model_config import ModelConfig
from weft.core.rope_scaling import Kind, RopeScaling
from weft.errors import Fault

THETA = 10_000.0
"""What transformers takes where nothing is set."""

ORIGINAL_CONTEXT = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"
PARTIAL = "partial_rotary_factor"
LLAMA3_DEFAULTS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
MSCALES = ("mscale", "mscale_all_dim")
TYPES_OF_TRANSFORMERS = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

_KNOWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (*LLAMA3_DEFAULTS, ORIGINAL_CONTEXT),
    "yarn": (
        "factor",
        *YARN_DEFAULTS,
        ORIGINAL_CONTEXT,
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


@dataclass(frozen=True)
class ScaledRope:
    """Rotary embedding with one base for all layers (a `RopeMapping`).

    Attributes:
        types: kinds of scaling that the family computes.
        own: the kind that has fields of its own; all others are in `rope_scaling`.
    """

    types: tuple[str, ...] = ("default",)
    own: str | None = None

    @property
    def _has_text(self) -> bool:
        """Whether the family has the field `rope_scaling`."""
        return bool({*self.types} - {"default", self.own})

    @property
    def hf_keys(self) -> tuple[str, ...]:
        """Keys of config.json that are read here."""
        return ("rope_theta", "rope_scaling", "rope_parameters", PARTIAL, ORIGINAL_CONTEXT)

    def faults(self, config: Json, *, key: str) -> Iterator[Fault]:
        """Settings that weft computes differently, or not at all."""
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(config.get(name) or {}, dict):
                yield Fault(
                    key,
                    f"{name} is no table",
                    got=repr(config[name]),
                    need="a table with rope_type",
                )
                return
        found = rope_parameters(config)
        kind = found.pop("rope_type")
        if kind not in self.types:
            what = "this type of rope scaling is not supported for this family"
            got, need = repr(kind), " or ".join(self.types)
            if kind in TYPES_OF_TRANSFORMERS:
                yield UncomputedSetting(key, what, got, need, setting="rope_parameters")
            else:
                yield Fault(key, what, got, need)
            return
        faults: list[Fault] = []
        for name, value in found.items():
            faults.extend(_value_faults(name, value, kind, key=key))
        if kind == "yarn":
            faults.extend(_yarn_faults(found, config, key=key, is_own=self.own == kind))
        if kind in ("linear", "dynamic") and not found.get("factor"):
            faults.append(Fault(key, f"rope: {kind} without factor"))
        has_length = config.get(LONGEST) or found.get(ORIGINAL_CONTEXT)
        if kind in ("llama3", "yarn") and not has_length and not faults:
            faults.append(Fault(key, f"rope: {kind} without {ORIGINAL_CONTEXT}"))
        if self._has_text and not faults and kind != "default":
            try:
                _scaling(kind, found, config)
            except ValueError as error:
                faults.append(Fault(key, f"rope: {error}"))
        yield from faults

    def fields(self, config: Json) -> Flat:
        """The Config's fields of a config.json without faults."""
        found = rope_parameters(config)
        fields: Flat = {"rope_theta": found["rope_theta"]}
        kind = found["rope_type"]
        if self._has_text:
            is_text = kind not in ("default", self.own)
            fields["rope_scaling"] = _scaling(kind, found, config).text if is_text else None
        if kind != self.own:
            if self.own is not None:
                fields["rope_scaling_factor"] = 1.0
            return fields
        longest: int = config.get(LONGEST) or found[ORIGINAL_CONTEXT]
        original: int = found.get(ORIGINAL_CONTEXT, longest)
        if kind == "llama3":
            scaling = {name: found.get(name, value) for name, value in LLAMA3_DEFAULTS.items()}
        else:
            scaling = _yarn_scaling(found, factor=longest / original)
        for name, value in scaling.items():
            fields[f"rope_scaling_{name}"] = value
        fields["rope_scaling_original_context"] = original
        return fields

    def write(self, cfg: ModelConfig) -> dict[str, Any]:
        """Keys of config.json, old style: every version of transformers reads it."""
        values = cfg.model_dump()
        theta = values["rope_theta"]
        if values.get("rope_scaling") is not None:
            return {"rope_theta": theta, "rope_scaling": _written(values["rope_scaling"])}
        if values.get("rope_scaling_factor", 1.0) == 1:
            return {"rope_theta": theta, "rope_scaling": None}
        kind = self.own
        if kind == "llama3":
            names = tuple(LLAMA3_DEFAULTS)
        else:
            names = ("factor", *YARN_DEFAULTS, "mscale", "mscale_all_dim")
        scaling = {name: values[f"rope_scaling_{name}"] for name in names}
        original = values["rope_scaling_original_context"]
        return {
            "rope_theta": theta,
            "rope_scaling": {"rope_type": kind, **scaling, ORIGINAL_CONTEXT: original},
        }

    def unwritable(self, cfg: ModelConfig) -> Iterator[Fault]:
        """Settings of YaRN that transformers computes differently."""
        values = cfg.model_dump()
        if values.get("rope_scaling_factor", 1.0) == 1 or "rope_scaling_mscale" not in values:
            return
        mscale = values["rope_scaling_mscale"]
        mscale_all_dim = values["rope_scaling_mscale_all_dim"]
        if mscale and mscale_all_dim:
            return
        if (mscale, mscale_all_dim) != (1.0, 0.0):
            got = f"mscale {mscale}, mscale_all_dim {mscale_all_dim}"
            what = "transformers has no such pair of mscales"
            yield Fault("model.rope_scaling_mscale", what, got=got, need="both above 0, or 1 and 0")


def rope_parameters(config: Json) -> dict[str, Any]:
    """All settings of rotary embedding in config.json, in the new style."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = config.get("rope_theta")
    if theta is None:
        theta = THETA
    found: dict[str, Any] = {"rope_theta": theta}
    partial = config.get(PARTIAL)
    if partial is not None:
        found[PARTIAL] = partial
    found.update(
        {name: value for name, value in table.items() if value is not None and name != "type"}
    )
    original_context = config.get(ORIGINAL_CONTEXT)
    if original_context is not None:
        found[ORIGINAL_CONTEXT] = original_context
    found["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    return found


def _value_faults(name: str, value: Any, kind: str, *, key: str) -> Iterator[Fault]:
    """Faults of one setting."""
    if not isinstance(value, int | float):
        yield Fault(key, f"rope: {name} is no number", got=repr(value))
    elif not 0 <= value < math.inf or (name in ("rope_theta", ORIGINAL_CONTEXT) and not value):
        yield Fault(key, f"rope: {name}: out of range", got=repr(value), need="a number above 0")
    elif name == PARTIAL:
        if value != 1:
            yield Fault(key, f"rope: {name}: weft rotates whole heads", got=repr(value), need="1")
    elif name not in ("rope_theta", ORIGINAL_CONTEXT, *_KNOWN_KEYS[kind]):
        yield Fault(
            key, f"rope: {name}: unknown for type {kind!r}", got=repr(value), need="no such key"
        )


def _scaling(kind: str, found: Mapping[str, Any], config: Json) -> RopeScaling:
    """The scaling that a family's `rope_scaling` holds.

    Raises:
        ValueError: settings that contradict each other.
    """
    own: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        longest = config.get(LONGEST) or found.get(ORIGINAL_CONTEXT) or 0
        own["original"] = int(found.get(ORIGINAL_CONTEXT, longest))
    if kind == "llama3":
        values = {**LLAMA3_DEFAULTS, **found}
        own |= {"low": values["low_freq_factor"], "high": values["high_freq_factor"]}
        return RopeScaling("llama3", values["factor"], **own)
    if kind == "yarn":
        values = _yarn_scaling(found, factor=longest / (own["original"] or 1))
        gain = found.get("attention_factor")
        if gain is None and values["mscale_all_dim"]:
            ratio = [0.1 * values[name] * math.log(values["factor"]) + 1 for name in MSCALES]
            gain = ratio[0] / ratio[1] if values["factor"] > 1 else 1.0
        own |= {"fast": values["beta_fast"], "slow": values["beta_slow"], "gain": gain}
        return RopeScaling("yarn", values["factor"], truncate=found.get("truncate", True), **own)
    return RopeScaling(cast(Kind, kind), found["factor"])


def _written(text: str) -> dict[str, Any]:
    """A scaling as config.json has it."""
    scaling = RopeScaling.parse(text)
    table: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        table |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        table |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow}
        table |= {"attention_factor": scaling.cosine_gain, "truncate": scaling.truncate}
    return table | ({ORIGINAL_CONTEXT: scaling.original} if scaling.original else {})


def _yarn_faults(
    found: Mapping[str, Any], config: Json, *, key: str, is_own: bool
) -> Iterator[Fault]:
    factor = found.get("attention_factor")
    if factor is not None and is_own:
        yield UncomputedSetting(
            key,
            "rope: attention_factor: weft computes it from mscale",
            got=repr(factor),
            need="no such key",
            setting="rope_parameters",
        )
    if found.get("truncate") is False and is_own:
        yield UncomputedSetting(
            key,
            "rope: truncate: weft rounds YaRN's ramp to whole features",
            got="False",
            need="True, or no such key",
            setting="rope_parameters",
        )
    if not (found.get("factor") or config.get(LONGEST)):
        yield Fault(key, "rope: yarn without factor")
    if found.get("mscale_all_dim") and not found.get("mscale"):
        yield Fault(key, "rope: mscale_all_dim without mscale", need="both")


def _yarn_scaling(found: Mapping[str, Any], *, factor: float) -> dict[str, Any]:
    """YaRN's settings; `factor` is used where config.json has none."""
    scaling = {name: found.get(name) or default for name, default in YARN_DEFAULTS.items()}
    scaling["factor"] = found.get("factor") or factor
    scaling["mscale"] = 1.0
    scaling["mscale_all_dim"] = 0.0
    if found.get("mscale") and found.get("mscale_all_dim"):
        scaling["mscale"] = found["mscale"]
        scaling["mscale_all_dim"] = found["mscale_all_dim"]
    return scaling
