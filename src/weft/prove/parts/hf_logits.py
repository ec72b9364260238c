"""Logits of transformers for an exported folder, in float64, and how far its own rounding moves them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from weft.config.hf.read_config import CONFIG
from weft.models.transformers.wide_constants import WideConstants
from weft.prove.against.float64 import float32_modules, noise
from weft.prove.against.hf_model import HFModel, loaded_model
from weft.prove.bounds import FACTOR, TOLERANCE

SEEDS = (1, 2)


@dataclass(frozen=True)
class HFLogits:
    """The logits of some sequences; see Note [float32 in transformers] for their rounding.

    Attributes:
        tokens: [B, S].
    """

    folder: Path
    tokens: Tensor

    @cached_property
    def model(self) -> HFModel:
        """The model, as transformers reads it.

        Raises:
            CheckpointError: transformers misses tensors, or does not know some.
        """
        config = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        found = loaded_model(self.folder, config, 0)
        found.model.eval()
        return found

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Logits of all sequences, [B, S, V]."""
        with WideConstants():
            logits: Tensor = self.model.model(input_ids=self.tokens, use_cache=False).logits
        return logits

    @cached_property
    def float32_names(self) -> tuple[str, ...]:
        """Modules that compute in float32 still."""
        return float32_modules(self.model.model, self.compute)

    @cached_property
    def bound(self) -> float:
        """Largest relative difference of logits that rounding explains."""
        plain = self.compute()
        modules = tuple(map(self.model.model.get_submodule, self.float32_names))
        spread = 0.0
        for seed in SEEDS if modules else ():
            with noise(modules, eps=torch.finfo(torch.float32).eps, seed=seed):
                moved = (self.compute() - plain).abs().max() / plain.abs().max()
            spread = max(spread, float(moved))
        return max(TOLERANCE, FACTOR * spread)

    @property
    def source(self) -> str:
        """Where the bound comes from."""
        if not self.float32_names:
            return f"{TOLERANCE:.0e}"
        return f"{FACTOR:g} times what float32 in {self.float32_names[0]} moves"
