"""Which linears get LoRA adapters: `lora.targets` matched against the names of a model's linears, and its checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from weft.config.schema import LoraConfig
from weft.core.model_config import ModelConfig, linear_flops, weight_flops
from weft.errors import Fault, did_you_mean
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


def targets_exist(lora: LoraConfig, model: ModelConfig) -> Iterable[Fault]:
    """Every one of `lora.targets` selects a linear of the model."""
    linears = model.linears()
    if not lora.rank:
        if lora.targets:
            what = "is 0 (no adapters), and lora.targets names some"
            yield Fault("lora.rank", what, fix=f"--lora.rank {DEFAULT_RANK}")
        return
    if not linears:
        what = (
            f"{model.family} has no attention or feed-forward projections that adapters can extend"
        )
        yield Fault(
            "lora.rank", what, got=str(lora.rank), need="a language model", fix="--lora.rank 0"
        )
        return
    for target in lora.targets:
        if not any(matches(target, linear) for linear in linears):
            what = f"no linear of {model.family} has this name"
            yield Fault("lora.targets", what, got=repr(target), fix=_nearest_target(target, model))


def _nearest_target(target: str, model: ModelConfig) -> str:
    """The linear that an unknown target may mean; `q_proj` of Hugging Face's models is `q`."""
    leaves = sorted({linear.rpartition(".")[2] for linear in model.linears()})
    if "experts" in model.axis_sizes() and "expert" in target:
        return f"routed experts take no adapters; these do: {', '.join(leaves)}"
    leaf = target.rpartition(".")[2] or target
    without_suffix = leaf.removesuffix("_proj")
    if without_suffix in leaves:
        return f"did you mean {without_suffix!r}?"
    return did_you_mean(leaf, leaves)


def rank_is_low(lora: LoraConfig, model: ModelConfig) -> Iterable[Fault]:
    """The rank is at most the smaller side of each adapted linear."""
    if not lora.rank:
        return
    linears = model.linears()
    smaller_sides: dict[str, int] = {}
    for name in adapted_linears(lora.targets, linears):
        smaller_sides[name] = min(linears[name])
    if not smaller_sides:
        return
    name = min(smaller_sides, key=lambda linear: smaller_sides[linear])
    limit = smaller_sides[name]
    if lora.rank > limit:
        out_features, in_features = linears[name]
        yield Fault(
            "lora.rank",
            f"is larger than the smaller side of {name}, which has {in_features} features in, {out_features} out",
            got=str(lora.rank),
            need=f"at most {limit}",
            fix=f"--lora.rank {min(DEFAULT_RANK, limit)}",
        )
