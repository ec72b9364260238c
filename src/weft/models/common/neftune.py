"""Families whose models add noise to the embeddings of tokens while training (NEFTune); see embedding_noise.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn

from weft.errors import Fault, PlanError
from weft.models import Family, builders_of
from weft.models.common.embedding_noise import with_noise
from weft.models.common.lazy_blocks import Builder, Builders

KEY = "neftune"


@dataclass(frozen=True)
class NoisyFamily:
    """A family whose models have noise on the embeddings of tokens."""

    plain: Family
    alpha: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The plain family's chain, whose first block has noise."""
        blocks = self.plain.blocks(cfg)
        first = next(iter(blocks))
        self._add_noise(first, blocks[first], cfg)
        return blocks

    def builders(self, cfg: Any) -> Builders | None:
        """Builders of these blocks."""
        plain = builders_of(self.plain, cfg)
        if plain is None:
            return None
        first, build = next(iter(plain.items()))
        return {**plain, first: partial(self._build, first, build, cfg)}

    def _build(self, name: str, build: Builder, cfg: Any) -> nn.Module:
        block = build()
        self._add_noise(name, block, cfg)
        return block

    def _add_noise(self, name: str, block: nn.Module, cfg: Any) -> None:
        embedding = _token_embedding(name, block, vocab=cfg.axis_sizes().get("vocab", 0))
        # A block that scales its embeddings afterwards gets noise that is smaller by as much.
        scale = getattr(block, "embedding_scale", 1.0)
        with_noise(embedding, self.alpha / float(scale))


def _token_embedding(name: str, block: nn.Module, *, vocab: int) -> nn.Embedding:
    """The embedding of tokens in the first block: the only one, or that of the vocabulary."""
    found = [module for module in block.modules() if isinstance(module, nn.Embedding)]
    if len(found) > 1:
        found = [module for module in found if module.num_embeddings == vocab]
    if len(found) != 1:
        what = f"which embedding of the block {name} is that of tokens is not clear"
        need = "one nn.Embedding in the first block, or one of as many rows as the vocabulary"
        raise PlanError(Fault(KEY, what, need=need, fix="--neftune 0"))
    return found[0]


def noisy(plain: Family, alpha: float) -> Family:
    """The family with this noise; the plain family where it is 0."""
    return cast(Family, NoisyFamily(plain, alpha)) if alpha else plain
