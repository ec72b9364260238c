"""Owns the last word on a folder: the same tokens through weft's model and through transformers', in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import WeftError
from weft.models import FAMILIES
from weft.models.common.batch import forward, token_batch, with_later_targets
from weft.models.common.init import named_parameters, tie

NUM, SEQ, SEED = 2, 32, 0
BOUND = 1e-3
"""Largest difference of logits, of the largest logit, that float32 explains.

Rounding is 6e-8 an operation; both sides sum some thousand terms in other orders, in up to a hundred layers. Tiny models
show 1e-6. Two rows of a table that are exchanged show 0.1 and more."""
ROOM = 0.8
"""Share of the free memory that both models may take."""


@dataclass(frozen=True)
class Compared:
    """What came out; `reason` where nothing was compared."""

    difference: float = 0.0
    largest: float = 0.0
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Nothing speaks against the folder."""
        return bool(self.reason) or self.difference <= BOUND * self.largest

    def __str__(self) -> str:
        if self.reason:
            return f"not compared: {self.reason}"
        size = f"{self.difference:.1e} (largest logit {self.largest:.3g}; float32)"
        return f"largest logit difference to transformers: {size}" + ("" if self.holds else ": NOT the same model")


Types = Mapping[str, torch.dtype]


def compare(folder: Path, source: Source, cfg: ModelConfig, *, types: Types | None = None) -> Compared:
    """Logits of the folder in transformers and of `source` in weft.

    Args:
        types: to which the values of `source` were rounded on their way to the folder, by name.

    Raises:
        WeftError: transformers cannot load the folder.
    """
    if importlib.util.find_spec("transformers") is None:
        return Compared(reason="transformers is not installed")
    need = 2 * 4 * sum(Box.whole(shape).size for shape in source.shapes.values())
    if need > ROOM * (free := psutil.virtual_memory().available):
        return Compared(reason=f"both models take {need / 1e9:.1f} GB in float32, {free / 1e9:.1f} GB are free")
    longest = getattr(cfg, "max_seq_len", SEQ)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(cfg.axis_sizes()["vocab"], (NUM, min(SEQ, longest)), generator=generator)
    with torch.no_grad():
        theirs = their_logits(folder, tokens)
        ours = our_logits(source, cfg, tokens, types=types or {})
    return Compared((ours - theirs).abs().max().item(), theirs.abs().max().item())


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """What transformers makes of the folder, float32."""
    import transformers  # an extra, and seconds to import

    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:
        raise WeftError(f"{folder}: transformers cannot load it: {error}") from error
    logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits


def our_logits(source: Source, cfg: ModelConfig, tokens: Tensor, *, types: Types) -> Tensor:
    """What weft's model makes of the stored values, float32."""
    blocks = stored_model(source, cfg, types=types)
    batch = token_batch(tokens, tokens)
    batch = with_later_targets(batch) if cfg.reads_later_targets else batch
    return forward({name: block for name, block in blocks.items() if name != "loss"}, batch)


def stored_model(source: Source, cfg: ModelConfig, *, types: Types) -> dict[str, nn.Module]:
    """The whole model on this device, float32, with stored values."""
    family = FAMILIES[cfg.family]
    with torch.device("meta"):
        blocks = {name: block.to_empty(device="cpu") for name, block in family.blocks(cfg).items()}
    ties = family.ties(cfg)
    tie(blocks, ties)
    for name, param in named_parameters(blocks).items():
        if name not in ties:
            value = source.read(name, Box.whole(source.shapes[name]))
            param.data = value.to(types.get(name, value.dtype)).float()
    return blocks
