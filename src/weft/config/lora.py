"""Which linears get LoRA adapters: `lora.targets` matched against the names of a model's linears."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from weft.config.schema import LoraConfig
from weft.core.model_config import ModelConfig, linear_flops, weight_flops
from weft.layout.utilization import ALL_TRAINED, AdapterFlops

LORA_A, LORA_B = ".lora_a.weight", ".lora_b.weight"
"""Suffixes of the two factors of an adapter, after the global name of its linear."""
LORA_M = ".lora_magnitude.weight"
"""Suffix of what DoRA adds to the norms of the rows of a linear's weight."""
DEFAULT_RANK = 8


def adapted_linears(targets: Collection[str], linears: Iterable[str]) -> tuple[str, ...]:
    """The linears (global names) that match a target; all of them where there are no targets.

    A target is the end of a name, from a dot on, or a pattern for such: `q`, `attn.*`,
    `layer[0-3].mlp.up`.
    """
    if not targets:
        return tuple(linears)
    return tuple(name for name in linears if any(matches(target, name) for target in targets))


def adapter_flops(lora: LoraConfig, model: ModelConfig, seq_len: int) -> AdapterFlops:
    """Forward FLOPs of frozen weights and of adapters, for one sequence."""
    if not lora.rank:
        return ALL_TRAINED
    linears = model.linears()
    widths = [sum(linears[name]) for name in adapted_linears(lora.targets, linears)]
    return AdapterFlops(
        frozen=weight_flops(model, seq_len), adapters=linear_flops(seq_len, lora.rank * sum(widths))
    )


def matches(target: str, linear: str) -> bool:
    """Whether one of `lora.targets` selects this linear."""
    return fnmatchcase(linear, target) or fnmatchcase(linear, f"*.{target}")


def adapted_linear(name: str) -> str | None:
    """The global name of the linear whose adapter a parameter is part of; None for any other
    parameter.
    """
    for suffix in (LORA_A, LORA_B, LORA_M):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return None
