"""Owns Qwen3 (Yang et al. 2025): normalised queries and keys, head size of its own, grouped key/value heads, SwiGLU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import (
    AxisTable,
    BlockSpec,
    Draw,
    LinearShapes,
    ModelConfig,
    attention_linears,
    causal_attention_flops,
    check_divides,
    gated_linears,
    in_layers,
    linear_flops,
)

if TYPE_CHECKING:
    from torch import nn

    from weft.models.common.layers import Attention


class Trunk(ModelConfig):
    """What Qwen3's dense and mixed models have in common: everything but the feed-forward part."""

    kind: ClassVar[Literal["tokens", "images"]] = "tokens"

    layers: int = Field(4, ge=1, description="transformer layers")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    heads: int = Field(4, ge=1, description="query heads")
    kv_heads: int = Field(2, ge=1, description="key/value heads, shared by heads / kv_heads query heads each")
    head_size: int = Field(32, ge=2, multiple_of=2, description="width of a head; heads x head_size need not be dim")
    vocab: int = Field(256, ge=1, description="entries of the vocabulary; 256 for bytes")
    max_seq_len: int = Field(40_960, ge=1, description="context that the model is published for; bounds nothing here")
    norm_eps: float = Field(1e-6, gt=0, description="added to the mean square in RMSNorm")
    tied: bool = Field(False, description="the head projects with the token embedding")
    rope_theta: float = Field(1_000_000.0, gt=0, description="base of RoPE's wavelengths")

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        if "heads" in info.data:
            check_divides(info.data["heads"], kv_heads, value_name="heads", parts_name="kv_heads")
        return kv_heads

    def chain_specs(self, seq_len: int, *, mlp_weights: int) -> tuple[BlockSpec, ...]:
        """The blocks of a chain whose layers' feed-forward part has so many weights that each token meets."""
        hidden = ("batch", "seq", self.dim)
        q_width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        linears = linear_flops(seq_len, 2 * self.dim * q_width, 2 * self.dim * kv_width, mlp_weights)
        layer = linears + causal_attention_flops(seq_len, q_width)
        head = linear_flops(seq_len, self.dim * self.vocab)
        return (
            BlockSpec("embed", 0.0, hidden, is_layer=False),
            *(BlockSpec(f"layer{i}", layer, hidden, is_layer=True) for i in range(self.layers)),
            BlockSpec("head", head, ("batch", "seq", self.vocab), is_layer=False),
            BlockSpec("loss", 0.0, (), is_layer=False),
        )

    def linears(self) -> LinearShapes:
        widths = {"q_width": self.heads * self.head_size, "kv_width": self.kv_heads * self.head_size}
        return in_layers(attention_linears(self.dim, **widths), range(self.layers))


class Config(Trunk):
    """Qwen3's shape; the defaults are qwen3-tiny."""

    family: ClassVar[str] = "qwen3"

    ffn: int = Field(352, ge=1, description="width of the feed-forward layer")

    def axis_sizes(self) -> dict[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads, "ffn": self.ffn, "vocab": self.vocab}

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        return self.chain_specs(seq_len, mlp_weights=3 * self.dim * self.ffn)

    def linears(self) -> LinearShapes:
        return super().linears() | in_layers(gated_linears(self.dim, self.ffn), range(self.layers))


def _published(*, layers: int, dim: int, heads: int, ffn: int, tied: bool = False) -> Config:
    """What the dense models have in common: 8 key/value heads, head size, vocabulary."""
    return Config(layers=layers, dim=dim, heads=heads, kv_heads=8, head_size=128, ffn=ffn, vocab=151_936, tied=tied)


PRESETS = {
    "qwen3-tiny": Config(),
    "qwen3-0.6b": _published(layers=28, dim=1024, heads=16, ffn=3072, tied=True),
    "qwen3-8b": _published(layers=36, dim=4096, heads=32, ffn=12_288),
}

TRUNK_AXES: AxisTable = {
    "embed.tok.weight": ("vocab", "embed"),
    "layer*.attn.q.weight": ("heads", "embed"),
    "layer*.attn.[kv].weight": ("kv_heads", "embed"),
    "layer*.attn.o.weight": ("embed", "heads"),
    "layer*.attn.[qk]_norm.weight": ("head_size",),
    "layer*.attn_norm.weight": ("norm",),
    "layer*.mlp_norm.weight": ("norm",),
    "head.norm.weight": ("norm",),
    "head.proj.weight": ("vocab", "embed"),
}

AXES: AxisTable = {
    **TRUNK_AXES,
    "layer*.mlp.gate.weight": ("ffn", "embed"),
    "layer*.mlp.up.weight": ("ffn", "embed"),
    "layer*.mlp.down.weight": ("embed", "ffn"),
}


def ties(cfg: Trunk) -> dict[str, str]:
    """Alias -> owner."""
    return {"head.proj.weight": "embed.tok.weight"} if cfg.tied else {}


def trunk_init(cfg: Trunk) -> dict[str, Draw]:
    """`init` of all but the feed-forward part."""
    return {
        "embed.tok.weight": ("normal", 0.02),
        "layer*.attn.[qkv].weight": ("normal", 0.02),
        "layer*.attn.o.weight": ("normal", residual_std(cfg)),
        "*norm.weight": ("ones",),
        "head.proj.weight": ("normal", 0.02),
    }


def residual_std(cfg: Trunk) -> float:
    """Standard deviation of the projections onto the residual stream."""
    return 0.02 / math.sqrt(2 * cfg.layers)


def init(cfg: Config) -> dict[str, Draw]:
    """Normal, std 0.02; projections onto the residual stream are scaled by 1 / sqrt(2 x layers)."""
    return {
        **trunk_init(cfg),
        "layer*.mlp.gate.weight": ("normal", 0.02),
        "layer*.mlp.up.weight": ("normal", 0.02),
        "layer*.mlp.down.weight": ("normal", residual_std(cfg)),
    }


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"; `ties` are not applied yet."""
    from weft.models.common.layers import Block, SwiGLU  # late: a config is read and checked without torch

    def layer() -> nn.Module:
        return Block(attn_norm=norm(cfg), attn=attention(cfg), mlp_norm=norm(cfg), mlp=SwiGLU(cfg.dim, cfg.ffn))

    return chain_of(cfg, [layer() for _ in range(cfg.layers)])


def chain_of(cfg: Trunk, layers: list[nn.Module]) -> dict[str, nn.Module]:
    """The chain around these layers."""
    from torch import nn

    from weft.models.common.layers import Embed, Head, Loss

    return {
        "embed": Embed(cfg.vocab, cfg.dim),
        **{f"layer{i}": layer for i, layer in enumerate(layers)},
        "head": Head(norm(cfg), nn.Linear(cfg.dim, cfg.vocab, bias=False)),
        "loss": Loss(),
    }


def norm(cfg: Trunk) -> nn.Module:
    """Norm of the residual stream."""
    from torch import nn

    return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)


def attention(cfg: Trunk) -> Attention:
    """Attention with normalised queries and keys."""
    from weft.models.common.layers import Attention
    from weft.models.common.rope import Rope

    return Attention(
        cfg.dim,
        heads=cfg.heads,
        kv_heads=cfg.kv_heads,
        head_size=cfg.head_size,
        rope=Rope(cfg.head_size, theta=cfg.rope_theta),
        qk_norm_eps=cfg.norm_eps,
    )
