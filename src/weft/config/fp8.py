"""Which linears compute in 8-bit floats: `precision.linears` and `precision.fp8_exclude` against a model's names."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.lora import matches
from weft.config.schema import PrecisionConfig
from weft.core.model_config import LinearShapes, ModelConfig


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
    leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    others = ["weight gradients", "the output projection"]
    if "experts" in model.axis_sizes():
        others += ["routers", "routed experts"]
    others += [f"what {target} names" for target in precision.fp8_exclude]
    yield (
        f"fp8: outputs and input gradients of {len(names)} linears ({leaves}); "
        f"in {precision.compute}: {', '.join(others)}"
    )
