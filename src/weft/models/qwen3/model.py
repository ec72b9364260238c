"""The blocks of Qwen3: the decoder trunk with normalised queries and keys."""

from __future__ import annotations

from torch import nn

from weft.models.common.decoder import attention, decoder_chain, dense_layer
from weft.models.qwen3.config import Config


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    layers = [dense_layer(cfg, attention(cfg, qk_norm=nn.RMSNorm)) for _ in range(cfg.layers)]
    return decoder_chain(cfg, layers)
