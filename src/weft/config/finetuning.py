"""Defaults for fine-tuning: learning rate, weight decay and sequence length of runs that start from a trained model."""

from __future__ import annotations

from weft.config.keys import Flat
from weft.config.schema import ModelSection, OptimConfig

FULL: Flat = {"optim.lr": 2e-5, "optim.weight_decay": 0.0}
"""Of runs that train all parameters of a model from `model.from_hf`."""

LORA: Flat = {"optim.lr": 2e-4, "optim.weight_decay": 0.0}
"""Of runs that train adapters: they start at zero, and take a ten times higher rate (Hu et al.
2021).
"""

MAX_LENGTH = 1024
"""Tokens; a model with a shorter context gets its own length."""


def finetuning_defaults(asked: Flat, folder: Flat) -> Flat:
    """Dotted key -> default of a run with these keys; empty if it does not fine-tune.

    Args:
        asked: keys that the user sets.
        folder: keys that the folder of `model.from_hf` determines.
    """
    defaults: Flat = {}
    loss = asked.get("loss")
    if loss == "reward":
        defaults.update({"data.format": "reward", "model.labels": 1})
    elif loss == "classify":
        classes = asked.get("data.classes") or ()
        defaults.update({"data.format": "classify", "model.labels": len(classes)})
    if asked.get("lora.rank"):
        defaults.update(LORA)
    elif asked.get("model.from_hf"):
        defaults.update(FULL)
    context = folder.get("model.max_seq_len")
    if asked.get("model.from_hf") and isinstance(context, int):
        defaults["data.seq_len"] = min(MAX_LENGTH, context)
    return defaults


def defaults_note(
    model: ModelSection, optim: OptimConfig, *, seq_len: int, lora_rank: int
) -> str | None:
    """The fine-tuning defaults that are in effect, as flags; None without any."""
    asked: Flat = {"lora.rank": lora_rank, "model.from_hf": model.from_hf}
    context = getattr(model, "max_seq_len", None)
    defaults = finetuning_defaults(asked, {"model.max_seq_len": context})
    current = {
        "optim.lr": optim.lr,
        "optim.weight_decay": optim.weight_decay,
        "data.seq_len": seq_len,
    }
    words = [f"--{key} {value:g}" for key, value in defaults.items() if current[key] == value]
    return f"fine-tuning defaults: {' '.join(words)}" if words else None
