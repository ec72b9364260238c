"""The blocks of Mistral: the decoder trunk with a sliding window."""

from __future__ import annotations

from functools import partial

from torch import nn

from weft.core.attention_mask import AttentionMask
from weft.models.common.attention import Attend
from weft.models.common.decoder import attention, decoder_builders, dense_layer
from weft.models.common.layers import DecoderLayer
from weft.models.common.lazy_blocks import Builders, build_all
from weft.models.mistral.config import Config


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    windows = [cfg.window_of(layer) for layer in range(cfg.layers)]
    by_window = {window: partial(_layer, cfg, window) for window in windows}
    return decoder_builders(cfg, [by_window[window] for window in windows])


def _layer(cfg: Config, window: int | None) -> DecoderLayer:
    attend = Attend(mask=AttentionMask(window=window))
    return dense_layer(cfg, attention(cfg, attend=attend))


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))
