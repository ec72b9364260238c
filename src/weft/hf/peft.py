"""PEFT's file layout of LoRA adapters: tensor names and adapter_config.json. No torch.

    layer0.attn.q.lora_a.weight  ->  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

Note [Several linears in one]
    GPT-2's files hold q, k and v side by side in one matrix, and PEFT puts one adapter on it.
    Weft's adapters on q, k and v are one of n times the rank, n linears having adapters: their
    A below each other, their B on a diagonal of blocks,

        dq   Bq  .   .    Aq
        dk = .   Bk  .    Ak  x           at n times the alpha, so that alpha / rank stays.
        dv   .   .   Bv   Av

Source: peft 0.21, `LoraConfig`, `LoraModel._create_and_replace`, `get_peft_model_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from weft.config.hf.mapping import EXPERT, SCORE, WeightRule
from weft.config.lora import adapted_linears
from weft.config.schema import LoraConfig
from weft.core.model_config import ModelConfig
from weft.hf.match import mapping_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHT = ".weight"

Place = Callable[[str], str]
"""Path of a module in a text part -> its path in the model of several parts that has it."""


@dataclass(frozen=True)
class AdapterTarget:
    """One HF linear with an adapter.

    Attributes:
        module: its path in transformers' model.
        linears: weft's linears in it that have adapters, in the order in which they lie there.
        parts: which of `num_parts` equal parts of its outputs each of them is.
        is_transposed: whether its weight lies as [in, out].
    """

    module: str
    linears: tuple[str, ...]
    parts: tuple[int, ...]
    num_parts: int
    is_transposed: bool

    @property
    def prefix(self) -> str:
        """Prefix of the names of its adapter's tensors."""
        return f"base_model.model.{self.module}"


def adapter_targets(
    cfg: ModelConfig, lora: LoraConfig, *, place: Place | None = None
) -> tuple[AdapterTarget, ...]:
    """HF linears that have adapters, in the order of the family's rules."""
    adapted = set(adapted_linears(lora.targets, cfg.linears()))
    by_tensor: dict[str, list[WeightRule]] = {}
    for rule in _model_rules(cfg):
        linear = rule.param.removesuffix(WEIGHT)
        if linear not in adapted:
            continue
        rules = by_tensor.setdefault(rule.tensor, [])
        rules.append(rule)
    targets: list[AdapterTarget] = []
    for tensor, rules in by_tensor.items():
        target = _adapter_target(tensor, rules)
        targets.append(replace(target, module=place(target.module)) if place else target)
    return tuple(targets)


def _model_rules(cfg: ModelConfig) -> list[WeightRule]:
    """Rules of the family, with complete names; of transformers' own code, with those of its modules."""
    weights = mapping_of(cfg.family).weights
    return list(weights.expand(cfg) if weights.own is None else weights.expand_packed(cfg))


def _adapter_target(tensor: str, rules: list[WeightRule]) -> AdapterTarget:
    ordered = sorted(rules, key=_part_index)
    first = ordered[0]
    return AdapterTarget(
        module=tensor.removesuffix(WEIGHT),
        linears=tuple(rule.param.removesuffix(WEIGHT) for rule in ordered),
        parts=tuple(_part_index(rule) for rule in ordered),
        num_parts=first.slice.count if first.slice else 1,
        is_transposed=first.transposed,
    )


def _part_index(rule: WeightRule) -> int:
    if rule.slice:
        return rule.slice.index
    return 0


def adapter_config(
    cfg: ModelConfig, lora: LoraConfig, *, base: str | None, place: Place | None = None
) -> dict[str, Any]:
    """adapter_config.json; `base` is the name or folder of the base model in transformers.

    Modules of a model of several parts have whole names: others may end as they do.
    """
    targets = adapter_targets(cfg, lora, place=place)
    modules = [target.module for target in targets]
    multiples = {
        target.module: len(target.linears) for target in targets if len(target.linears) > 1
    }
    is_scored = bool(getattr(cfg, "labels", 0))
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scored else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _whole_number(lora.alpha),
        "rank_pattern": {module: times * lora.rank for module, times in multiples.items()},
        "alpha_pattern": {
            module: _whole_number(times * lora.alpha) for module, times in multiples.items()
        },
        "target_modules": sorted(modules if place else _short_names(modules, _all_modules(cfg))),
        "fan_in_fan_out": any(target.is_transposed for target in targets),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "use_rslora": False,
        "use_dora": lora.dora,
        "init_lora_weights": True,
        "modules_to_save": [SCORE.tensor.removesuffix(WEIGHT)] if is_scored else None,
        "inference_mode": True,
    }


def unexpected_keys(cfg: ModelConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Linears whose adapters PEFT 0.21 does not load with transformers 5, though their names follow
    the layout.

    In models with routed experts it takes gate_proj, up_proj, down_proj of any module for those of
    the experts, which transformers 5 holds in one tensor a layer (`_convert_peft_config_moe`).
    """
    if "experts" not in cfg.axis_sizes():
        return ()
    return tuple(
        linear
        for target in adapter_targets(cfg, lora)
        for linear in target.linears
        if ".mlp." in linear
    )


def _whole_number(value: float) -> int | float:
    """PEFT writes whole numbers as integers."""
    if value == int(value):
        return int(value)
    return value


def _all_modules(cfg: ModelConfig) -> set[str]:
    """All modules that a suffix could match; routed experts among them, by one name for all of a
    layer.
    """
    return {rule.tensor.removesuffix(WEIGHT).replace(EXPERT, "0") for rule in _model_rules(cfg)}


def _short_names(modules: Collection[str], all_modules: Iterable[str]) -> set[str]:
    """Suffixes that match these modules and no other: `q_proj`, or `self_attn.q_proj`, or the whole
    name.
    """
    others = set(all_modules) - set(modules)
    return {_shortest_suffix(module, others) for module in modules}


def _shortest_suffix(module: str, others: Collection[str]) -> str:
    """The last words of a module's path that no other module ends with."""
    words = module.split(".")
    for count in range(1, len(words)):
        suffix = ".".join(words[-count:])
        matches = [other for other in others if f".{other}".endswith(f".{suffix}")]
        if not matches:
            return suffix
    return module
