"""The blocks of Qwen2: the decoder trunk with biased queries, keys and values."""

from __future__ import annotations

from torch import nn

from weft.models.common.decoder import attention, decoder_chain, dense_layer
from weft.models.qwen2.config import Config


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    layers = [dense_layer(cfg, attention(cfg, qkv_bias=True)) for _ in range(cfg.layers)]
    return decoder_chain(cfg, layers)
