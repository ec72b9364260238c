"""Which linears compute in 8-bit floats: `precision.linears` and `precision.fp8_exclude` against a model's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.config.lora import matches
from weft.config.schema import PrecisionConfig
from weft.core.model_config import LinearShapes, ModelConfig
from weft.errors import counted


def fp8_linears(precision: PrecisionConfig, model: ModelConfig) -> tuple[str, ...]:
    """The linears (global names) whose products are computed in fp8: those of attention and
    feed-forward parts, and of routed experts, that `precision.fp8_exclude` does not name, as
    `lora.targets` names linears.
    """
    if precision.linears != "fp8":
        return ()
    excluded = precision.fp8_exclude
    return tuple(
        name for name in fp8_shapes(model) if not any(matches(target, name) for target in excluded)
    )


def fp8_shapes(model: ModelConfig) -> LinearShapes:
    """The linears that may compute in fp8, with their features out and in; of experts those of one."""
    return {**model.linears(), **model.expert_linears()}


def fp8_notes(precision: PrecisionConfig, model: ModelConfig) -> Iterator[str]:
    """Which products are computed in fp8, and which are not."""
    names = fp8_linears(precision, model)
    if not names:
        return
    of_experts = model.expert_linears()
    parts = []
    if linears := [name for name in names if name not in of_experts]:
        parts.append(f"{counted(len(linears), 'linear')} ({_leaves(linears)})")
    if experts := [name for name in names if name in of_experts]:
        num_layers = len({name.rpartition(".")[0] for name in experts})
        parts.append(f"routed experts of {counted(num_layers, 'layer')} ({_leaves(experts)})")
    others = ["weight gradients", "the output projection"]
    if of_experts:
        others.append("routers")
    others += [f"what {target} names" for target in precision.fp8_exclude]
    yield (
        f"fp8: outputs and input gradients of {' and '.join(parts)}; "
        f"in {precision.compute}: {', '.join(others)}"
    )


def _leaves(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
