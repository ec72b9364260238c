"""Events of a run as series of numbers and texts, under the names that trackers show. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]

REWARDS = ("chosen", "rejected", "margins", "accuracies")
"""Of answers; their series, and that of z0, have the names that TRL gives them."""
SERIES: Mapping[str, Mapping[str, str]] = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/lr",
        "tokens": "train/tokens",
        "loss_scale": "train/loss_scale",
        "expert_load": "train/expert_load",
        **{f"rewards_{name}": f"train/rewards/{name}" for name in REWARDS},
        "z0": "train/kl",
        "tokens_per_s": "speed/tokens_per_s",
        "step_s": "speed/step_s",
        "mfu": "speed/mfu",
        "mem_bytes": "memory/most_bytes",
    },
    "eval": {
        "loss": "eval/loss",
        "perplexity": "eval/perplexity",
        **{f"rewards_{name}": f"eval/rewards/{name}" for name in REWARDS},
    },
    "save": {"stall_s": "save/stall_s", "write_s": "save/write_s"},
}
"""Kind of event -> its field -> the series. Units are those of the fields."""

STAGE_MEMORY = "memory/stage{stage}_bytes"
BLOCK_SERIES = {
    name: f"blocks/{name}/{{block}}" for name in ("grad_norm", "param_rms", "output_rms")
}
"""Field of a `blocks` event -> the series of each block."""
TEXTS = ("guard", "restart", "proof", "save_failed", "sample", "note")
"""Kinds of events that are texts."""


def numbers_of(event: Event) -> dict[str, float]:
    """Series -> value of an event; values that are None are left out."""
    kind = str(event.get("event"))
    fields = SERIES.get(kind, {})
    numbers = {
        name: float(event[field]) for field, name in fields.items() if event.get(field) is not None
    }
    stages = event.get("stage_mem_bytes") or () if kind == "step" else ()
    if len(stages) > 1:
        for stage, num_bytes in enumerate(stages):
            numbers[STAGE_MEMORY.format(stage=stage)] = float(num_bytes)
    if kind == "blocks":
        for field, name in BLOCK_SERIES.items():
            values = event.get(field) or {}
            numbers |= {name.format(block=block): float(each) for block, each in values.items()}
    return numbers


def text_of(event: Event) -> str:
    """What an event says, "" where it has no text."""
    if event.get("event") not in TEXTS:
        return ""
    return str(event.get("text") or event.get("reason") or event.get("why") or "")


def all_series() -> list[str]:
    """Every series of one number a step, in order."""
    return [name for fields in SERIES.values() for name in fields.values()]
