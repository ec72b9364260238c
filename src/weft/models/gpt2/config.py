"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU in tanh form, biases, tied embedding."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import (
    AxisTable,
    BlockSpec,
    Draw,
    InputKind,
    LinearShapes,
    ModelConfig,
    attention_linears,
    causal_attention_flops,
    check_divides,
    in_layers,
    linear_flops,
)
from weft.errors import Fault
from weft.models.common.decoder_config import INIT_STD, Labels, decoder_specs, residual_std


class Config(ModelConfig):
    """GPT-2's shape; the defaults are gpt2-tiny."""

    family: ClassVar[str] = "gpt2"
    kind: ClassVar[InputKind] = "tokens"

    layers: int = Field(4, ge=1, description="transformer layers")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    heads: int = Field(4, ge=1, description="attention heads; divides dim")
    ffn: int = Field(512, ge=1, description="width of the feed-forward layer")
    vocab: int = Field(256, ge=1, description="entries of the vocabulary; 256 for bytes")
    max_seq_len: int = Field(256, ge=1, description="learned positions: no sequence may be longer")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in LayerNorm")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="of embeddings, attention and residuals; 0.1 as published"
    )

    labels: Labels = 0

    @field_validator("heads")
    @classmethod
    def _heads_divide_dim(cls, heads: int, info: ValidationInfo) -> int:
        if "dim" in info.data:
            check_divides(info.data["dim"], heads, value_name="dim", parts_name="heads")
        return heads

    def axis_sizes(self) -> dict[str, int]:
        return {"heads": self.heads, "ffn": self.ffn, "vocab": self.vocab}

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        linears = linear_flops(seq_len, 4 * self.dim * self.dim, 2 * self.dim * self.ffn)
        layer = linears + causal_attention_flops(seq_len, self.dim)
        return decoder_specs(
            dim=self.dim,
            outputs=self.labels or self.vocab,
            seq_len=seq_len,
            layer_flops=[layer] * self.layers,
        )

    def linears(self) -> LinearShapes:
        attention = attention_linears(self.dim, q_width=self.dim, kv_width=self.dim)
        mlp = {"mlp.up": (self.ffn, self.dim), "mlp.down": (self.dim, self.ffn)}
        return in_layers({**attention, **mlp}, range(self.layers))

    def check_seq_len(self, seq_len: int) -> Fault | None:
        if seq_len <= self.max_seq_len:
            return None
        return Fault(
            "data.seq_len",
            "longer than the positions that the model learns",
            got=str(seq_len),
            need=f"at most model.max_seq_len = {self.max_seq_len}",
            fix=f"set model.max_seq_len to {seq_len} or data.seq_len to {self.max_seq_len}",
        )


def _published(*, layers: int, dim: int, heads: int) -> Config:
    return Config(layers=layers, dim=dim, heads=heads, ffn=4 * dim, vocab=50_257, max_seq_len=1024)


PRESETS = {
    "gpt2-tiny": Config(),
    "gpt2-124m": _published(layers=12, dim=768, heads=12),
    "gpt2-355m": _published(layers=24, dim=1024, heads=16),
    "gpt2-774m": _published(layers=36, dim=1280, heads=20),
    "gpt2-1.5b": _published(layers=48, dim=1600, heads=25),
}

AXES: AxisTable = {
    "embed.tok.weight": ("vocab", "embed"),
    "embed.pos.weight": ("pos", "embed"),
    "layer*.attn.[qkv].weight": ("heads", "embed"),
    "layer*.attn.[qkv].bias": ("heads",),
    "layer*.attn.o.weight": ("embed", "heads"),
    "layer*.attn.o.bias": ("embed",),
    "layer*.mlp.up.weight": ("ffn", "embed"),
    "layer*.mlp.up.bias": ("ffn",),
    "layer*.mlp.down.weight": ("embed", "ffn"),
    "layer*.mlp.down.bias": ("embed",),
    "layer*.*_norm.*": ("norm",),
    "head.norm.*": ("norm",),
    "head.proj.weight": ("vocab", "embed"),
    "head.score.weight": ("labels", "embed"),
}


def ties(cfg: Config) -> dict[str, str]:
    """Alias -> owner: the head projects with the token embedding."""
    return {} if cfg.labels else {"head.proj.weight": "embed.tok.weight"}


def init(cfg: Config) -> dict[str, Draw]:
    """Normal; projections onto the residual stream are scaled by 1 / sqrt(2 x layers); biases are
    zero.
    """
    residual = residual_std(cfg.layers)
    return {
        "embed.*": ("normal", INIT_STD),
        "layer*.attn.[qkv].weight": ("normal", INIT_STD),
        "layer*.attn.o.weight": ("normal", residual),
        "layer*.mlp.up.weight": ("normal", INIT_STD),
        "layer*.mlp.down.weight": ("normal", residual),
        "layer*.attn.*.bias": ("zeros",),
        "layer*.mlp.*.bias": ("zeros",),
        "*norm.weight": ("ones",),
        "*norm.bias": ("zeros",),
        "head.proj.weight": ("normal", INIT_STD),
        "head.score.weight": ("normal", INIT_STD),
    }
