"""Owns LLaMA 3 (Grattafiori et al. 2024): RMSNorm, RoPE with llama3 scaling, grouped key/value heads, SwiGLU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import (
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

    from weft.models.common.rope import Rope


class Config(ModelConfig):
    """LLaMA 3's shape; the defaults are llama3-tiny."""

    family: ClassVar[str] = "llama3"
    kind: ClassVar[Literal["tokens", "images"]] = "tokens"

    layers: int = Field(4, ge=1, description="transformer layers")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    heads: int = Field(4, ge=1, description="query heads; divides dim")
    kv_heads: int = Field(2, ge=1, description="key/value heads, shared by heads / kv_heads query heads each")
    ffn: int = Field(352, ge=1, description="width of the feed-forward layer")
    vocab: int = Field(256, ge=1, description="entries of the vocabulary; 256 for bytes")
    max_seq_len: int = Field(8192, ge=1, description="context that the model is published for; bounds nothing here")
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    tied: bool = Field(False, description="the head projects with the token embedding")
    rope_theta: float = Field(10_000.0, gt=0, description="base of RoPE's wavelengths")
    rope_scaling_factor: float = Field(1.0, gt=0, description="long wavelengths grow by this; 1 turns scaling off")
    rope_scaling_low_freq_factor: float = Field(1.0, gt=0, description="waves over original context / this are long")
    rope_scaling_high_freq_factor: float = Field(4.0, gt=0, description="waves under original context / this stay")
    rope_scaling_original_context: int = Field(8192, ge=1, description="context before scaling, in tokens")

    @field_validator("heads")
    @classmethod
    def _heads_divide_dim(cls, heads: int, info: ValidationInfo) -> int:
        dim = info.data.get("dim")
        if dim is None:
            return heads
        check_divides(dim, heads, value_name="dim", parts_name="heads")
        if dim // heads % 2:
            raise ValueError(
                f"dim {dim} / heads {heads} = head size {dim // heads}, and RoPE turns pairs; try dim {2 * dim}"
            )
        return heads

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        if "heads" in info.data:
            check_divides(info.data["heads"], kv_heads, value_name="heads", parts_name="kv_heads")
        return kv_heads

    @field_validator("rope_scaling_high_freq_factor")
    @classmethod
    def _high_is_above_low(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("rope_scaling_low_freq_factor", 0.0)
        if high <= low:
            raise ValueError(f"{high} is not above rope_scaling_low_freq_factor {low}; try {4 * low}")
        return high

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    def axis_sizes(self) -> dict[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads, "ffn": self.ffn, "vocab": self.vocab}

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        hidden = ("batch", "seq", self.dim)
        kv_width = self.kv_heads * self.head_size
        linears = linear_flops(seq_len, 2 * self.dim * self.dim, 2 * self.dim * kv_width, 3 * self.dim * self.ffn)
        layer = linears + causal_attention_flops(seq_len, self.dim)
        head = linear_flops(seq_len, self.dim * self.vocab)
        return (
            BlockSpec("embed", 0.0, hidden, is_layer=False),
            *(BlockSpec(f"layer{i}", layer, hidden, is_layer=True) for i in range(self.layers)),
            BlockSpec("head", head, ("batch", "seq", self.vocab), is_layer=False),
            BlockSpec("loss", 0.0, (), is_layer=False),
        )

    def linears(self) -> LinearShapes:
        attention = attention_linears(self.dim, q_width=self.dim, kv_width=self.kv_heads * self.head_size)
        return in_layers(attention | gated_linears(self.dim, self.ffn), range(self.layers))


def _published(*, layers: int, dim: int, heads: int, ffn: int, scaling: float, tied: bool = False) -> Config:
    """What LLaMA 3.1 and 3.2 have in common: vocabulary, context, 8 key/value heads, RoPE's base and ramp."""
    return Config(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128_256,
        max_seq_len=131_072,
        tied=tied,
        rope_theta=500_000.0,
        rope_scaling_factor=scaling,
    )


PRESETS = {
    "llama3-tiny": Config(),
    "llama3-1b": _published(layers=16, dim=2048, heads=32, ffn=8192, scaling=32.0, tied=True),
    "llama3-3b": _published(layers=28, dim=3072, heads=24, ffn=8192, scaling=32.0, tied=True),
    "llama3-8b": _published(layers=32, dim=4096, heads=32, ffn=14336, scaling=8.0),
    "llama3-70b": _published(layers=80, dim=8192, heads=64, ffn=28672, scaling=8.0),
    "llama3-405b": _published(layers=126, dim=16384, heads=128, ffn=53248, scaling=8.0),
}

AXES = {
    "embed.tok.weight": ("vocab", "embed"),
    "layer*.attn.q.weight": ("heads", "embed"),
    "layer*.attn.[kv].weight": ("kv_heads", "embed"),
    "layer*.attn.o.weight": ("embed", "heads"),
    "layer*.mlp.gate.weight": ("ffn", "embed"),
    "layer*.mlp.up.weight": ("ffn", "embed"),
    "layer*.mlp.down.weight": ("embed", "ffn"),
    "layer*.*_norm.weight": ("norm",),
    "head.norm.weight": ("norm",),
    "head.proj.weight": ("vocab", "embed"),
}


def ties(cfg: Config) -> dict[str, str]:
    """Alias -> owner."""
    return {"head.proj.weight": "embed.tok.weight"} if cfg.tied else {}


def init(cfg: Config) -> dict[str, Draw]:
    """Normal, std 0.02; projections onto the residual stream are scaled by 1 / sqrt(2 x layers)."""
    residual = 0.02 / math.sqrt(2 * cfg.layers)
    return {
        "embed.tok.weight": ("normal", 0.02),
        "layer*.attn.[qkv].weight": ("normal", 0.02),
        "layer*.attn.o.weight": ("normal", residual),
        "layer*.mlp.gate.weight": ("normal", 0.02),
        "layer*.mlp.up.weight": ("normal", 0.02),
        "layer*.mlp.down.weight": ("normal", residual),
        "*norm.weight": ("ones",),
        "head.proj.weight": ("normal", 0.02),
    }


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"; `ties` are not applied yet."""
    from torch import nn  # late: a config is read and checked without torch

    from weft.models.common.layers import Attention, Block, Embed, Head, Loss, SwiGLU

    def norm() -> nn.Module:
        return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def layer() -> nn.Module:
        attn = Attention(cfg.dim, heads=cfg.heads, kv_heads=cfg.kv_heads, head_size=cfg.head_size, rope=_rope(cfg))
        return Block(attn_norm=norm(), attn=attn, mlp_norm=norm(), mlp=SwiGLU(cfg.dim, cfg.ffn))

    return {
        "embed": Embed(cfg.vocab, cfg.dim),
        **{f"layer{i}": layer() for i in range(cfg.layers)},
        "head": Head(norm(), nn.Linear(cfg.dim, cfg.vocab, bias=False)),
        "loss": Loss(),
    }


def _rope(cfg: Config) -> Rope:
    from weft.models.common.rope import Llama3Scaling, Rope

    scaling = Llama3Scaling(
        factor=cfg.rope_scaling_factor,
        low_freq_factor=cfg.rope_scaling_low_freq_factor,
        high_freq_factor=cfg.rope_scaling_high_freq_factor,
        original_context=cfg.rope_scaling_original_context,
    )
    return Rope(cfg.head_size, theta=cfg.rope_theta, scaling=None if cfg.rope_scaling_factor == 1 else scaling)
