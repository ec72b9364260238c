"""The blocks of Mistral: the decoder trunk with a sliding window."""

from __future__ import annotations

from torch import nn

from weft.core.attention_mask import AttentionMask
from weft.models.common.attention import Attend
from weft.models.common.decoder import attention, decoder_chain, dense_layer
from weft.models.mistral.config import Config


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    layers = []
    for layer in range(cfg.layers):
        attend = Attend(mask=AttentionMask(window=cfg.window_of(layer)))
        layers.append(dense_layer(cfg, attention(cfg, attend=attend)))
    return decoder_chain(cfg, layers)
