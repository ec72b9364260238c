"""Owns how adapters are named and described in PEFT's file layout: adapter_config.json, adapter_model.safetensors. Pure.

    layer0.attn.q.lora_a.weight  ->  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

Note [Several linears in one]
    GPT-2's files hold q, k and v side by side in one matrix, and PEFT puts one adapter beside it. Ours beside q, k and v
    are one of n times the rank, n linears having adapters: their A below each other, their B on a diagonal of blocks,

        dq   Bq  .   .    Aq
        dk = .   Bk  .    Ak  x           at n times the alpha, so that alpha / rank stays.
        dv   .   .   Bv   Av

Source: peft 0.21, `LoraConfig`, `LoraModel._create_and_replace`, `get_peft_model_state_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from weft.config.lora import adapted_linears
from weft.config.schema import LoraConfig
from weft.core.model_config import ModelConfig
from weft.hf.table import EXPERT, Row
from weft.hf.tables import TABLES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHT = ".weight"


@dataclass(frozen=True)
class Target:
    """One of their linears with an adapter.

    Attributes:
        module: its path in transformers' model.
        ours: our linears in it, those with adapters, in the order in which they lie there.
        places: which of `parts` equal parts of its outputs each of them is.
        is_transposed: whether its weight lies as [in, out].
    """

    module: str
    ours: tuple[str, ...]
    places: tuple[int, ...]
    parts: int
    is_transposed: bool

    @property
    def prefix(self) -> str:
        """Head of the names of its adapter's tensors."""
        return f"base_model.model.{self.module}"


def targets_of(cfg: ModelConfig, lora: LoraConfig) -> tuple[Target, ...]:
    """Their linears that have adapters, in the order of the family's table."""
    adapted = set(adapted_linears(lora.targets, cfg.linears()))
    rows = [row for row in rows_of(cfg) if row.ours.removesuffix(WEIGHT) in adapted]
    order = {row.theirs: place for place, row in reversed(list(enumerate(rows)))}
    rows.sort(key=lambda row: (order[row.theirs], row.share.index if row.share else 0))
    return tuple(_target(theirs, tuple(group)) for theirs, group in groupby(rows, key=lambda row: row.theirs))


def rows_of(cfg: ModelConfig) -> Iterator[Row]:
    """Rows of the family's weight table, with whole names."""
    table = TABLES[cfg.family]
    places = table.places(cfg)
    return (whole for row in table.rows for whole in row.at(places))


def _target(theirs: str, rows: tuple[Row, ...]) -> Target:
    share = rows[0].share
    return Target(
        module=theirs.removesuffix(WEIGHT),
        ours=tuple(row.ours.removesuffix(WEIGHT) for row in rows),
        places=tuple(row.share.index if row.share else 0 for row in rows),
        parts=share.parts if share else 1,
        is_transposed=rows[0].transposed,
    )


def adapter_config(cfg: ModelConfig, lora: LoraConfig, *, base: str | None) -> dict[str, Any]:
    """adapter_config.json; `base` is the name or folder of the model in transformers that the adapters belong to."""
    targets = targets_of(cfg, lora)
    wide = {target.module: len(target.ours) for target in targets if len(target.ours) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "rank_pattern": {module: times * lora.rank for module, times in wide.items()},
        "alpha_pattern": {module: _number(times * lora.alpha) for module, times in wide.items()},
        "target_modules": sorted(_short_names([target.module for target in targets], _all_modules(cfg))),
        "fan_in_fan_out": any(target.is_transposed for target in targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def strange_to_peft(cfg: ModelConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Linears whose adapters PEFT 0.21 does not find with transformers 5, though they lie where the layout says.

    In models with routed experts it takes gate_proj, up_proj, down_proj of any module for those of the experts, which
    transformers 5 holds in one tensor a layer (`_convert_peft_config_moe`).
    """
    if "experts" not in cfg.axis_sizes():
        return ()
    return tuple(name for target in targets_of(cfg, lora) for name in target.ours if ".mlp." in name)


def _number(value: float) -> int | float:
    """PEFT writes whole numbers as such."""
    return int(value) if value == int(value) else value


def _all_modules(cfg: ModelConfig) -> set[str]:
    """All that an ending could mean besides; routed experts among them, by one name for all of a layer."""
    return {row.theirs.removesuffix(WEIGHT).replace(EXPERT, "0") for row in rows_of(cfg)}


def _short_names(modules: Collection[str], everything: Iterable[str]) -> set[str]:
    """Endings that mean these modules and no other: `q_proj`, or `self_attn.q_proj`, or the whole name."""
    others = set(everything) - set(modules)
    return {_shortest(module, others) for module in modules}


def _shortest(module: str, others: Collection[str]) -> str:
    words = module.split(".")
    endings = (".".join(words[-count:]) for count in range(1, len(words) + 1))
    return next(end for end in endings if not any(other == end or other.endswith(f".{end}") for other in others))
