"""The blocks of Qwen2: the decoder trunk with biased queries, keys and values."""

from __future__ import annotations

from functools import partial

from torch import nn

from weft.models.common.decoder import attention, decoder_builders, dense_layer
from weft.models.common.layers import DecoderLayer
from weft.models.common.lazy_blocks import Builders, build_all
from weft.models.qwen2.config import Config


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    layer = partial(_layer, cfg)
    return decoder_builders(cfg, [layer] * cfg.layers)


def _layer(cfg: Config) -> DecoderLayer:
    return dense_layer(cfg, attention(cfg, qkv_bias=True))


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))
