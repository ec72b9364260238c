"""The blocks of LLaMA 3: the decoder trunk with scaled RoPE."""

from __future__ import annotations

from functools import partial

from torch import nn

from weft.models.common.decoder import attention, decoder_builders, default_rope, dense_layer
from weft.models.common.layers import DecoderLayer
from weft.models.common.lazy_blocks import Builders, build_all
from weft.models.common.rope import Llama3Scaling, Rope
from weft.models.llama3.config import Config


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    layer = partial(_layer, cfg)
    return decoder_builders(cfg, [layer] * cfg.layers)


def _layer(cfg: Config) -> DecoderLayer:
    return dense_layer(cfg, attention(cfg, rope=_rope(cfg)))


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))


def _rope(cfg: Config) -> Rope:
    scaling = Llama3Scaling(
        factor=cfg.rope_scaling_factor,
        low_freq_factor=cfg.rope_scaling_low_freq_factor,
        high_freq_factor=cfg.rope_scaling_high_freq_factor,
        original_context=cfg.rope_scaling_original_context,
    )
    is_scaled = cfg.rope_scaling_factor != 1
    if cfg.rope_scaling is not None:
        return default_rope(cfg)
    return Rope(cfg.head_size, theta=cfg.rope_theta, scaling=scaling if is_scaled else None)
