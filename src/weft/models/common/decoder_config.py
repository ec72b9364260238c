"""Config base of decoder-only language models: shared fields, FLOPs, logical axes, ties, starting values. No torch.

DecoderConfig           grouped-query attention, RoPE, RMSNorm; the feed-forward part is the subclass's
└─ DenseConfig          one gated MLP a layer (`ffn`)
   └─ FullWidthConfig   head size = dim / heads; else `head_size` is a field
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, field_validator
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
    gated_linears,
    in_layers,
    linear_flops,
)
from weft.core.rope_scaling import RopeScaling
from weft.errors import Fault

INIT_STD = 0.02

ContextLength = Annotated[
    int, Field(ge=1, description="context length of the published model; informational")
]
HeadSize = Annotated[
    int,
    Field(ge=2, multiple_of=2, description="width of a head; heads x head_size need not be dim"),
]
Labels = Annotated[
    int,
    Field(
        ge=0,
        le=254,
        description="outputs of a head that scores texts: classes, 1 of a reward model; 0: a language model",
    ),
]


def _in_vocabulary(padding_id: int | None, info: ValidationInfo) -> int | None:
    vocab = info.data.get("vocab")
    if padding_id is None or vocab is None or -vocab <= padding_id < vocab:
        return padding_id
    need = f"try 0 to {vocab - 1}, or none (pad_token_id null in config.json)"
    raise ValueError(f"{padding_id} is not in the vocabulary of {vocab}; {need}")


PaddingId = Annotated[
    int | None,
    Field(description="token whose vector the inputs do not train; -1 is the last one"),
    AfterValidator(_in_vocabulary),
]
"""Field behind `vocab`: the `padding_idx` of the token embedding."""
RopeTheta = Annotated[float, Field(gt=0, description="base of RoPE's wavelengths")]


class DecoderConfig(ModelConfig):
    """Shape of a decoder without its feed-forward part."""

    kind: ClassVar[InputKind] = "tokens"

    layers: int = Field(4, ge=1, description="transformer layers")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    heads: int = Field(4, ge=1, description="query heads")
    kv_heads: int = Field(
        2, ge=1, description="key/value heads, shared by heads / kv_heads query heads each"
    )
    vocab: int = Field(256, ge=1, description="entries of the vocabulary; 256 for bytes")
    padding_id: PaddingId = None
    max_seq_len: ContextLength = 8192
    norm_eps: float = Field(1e-6, gt=0, description="added to the mean square in RMSNorm")
    tied: bool = Field(False, description="the head projects with the token embedding")
    rope_theta: RopeTheta = 10_000.0
    labels: Labels = 0
    rope_scaling: str | None = Field(
        None,
        description="of RoPE's frequencies: 'linear factor=4', 'yarn factor=4 original=32768', 'llama3 ...', 'dynamic ...'",
    )

    if TYPE_CHECKING:

        @property
        def head_size(self) -> int:
            """Width of a head: a field of the subclass, or a property."""

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        if "heads" in info.data:
            check_divides(info.data["heads"], kv_heads, value_name="heads", parts_name="kv_heads")
        return kv_heads

    @field_validator("rope_scaling")
    @classmethod
    def _scaling_is_known(cls, text: str | None) -> str | None:
        return None if text is None else RopeScaling.parse(text).text

    def check_seq_len(self, seq_len: int) -> Fault | None:
        named = RopeScaling.parse(self.rope_scaling) if self.rope_scaling else None
        if named is None or named.kind != "dynamic" or seq_len <= self.max_seq_len:
            return None
        return Fault(
            "data.seq_len",
            "is beyond the context, where dynamic scaling of RoPE depends on the other sequences of a batch",
            got=str(seq_len),
            need=f"at most model.max_seq_len = {self.max_seq_len}",
            fix=f"data.seq_len {self.max_seq_len}, or model.rope_scaling 'linear factor=...' or 'yarn ...'",
        )

    @abstractmethod
    def feed_forward_axes(self) -> dict[str, int]:
        """Units of the logical axes of the feed-forward parts, as in `axis_sizes`."""

    @abstractmethod
    def feed_forward_weights(self) -> int:
        """Matrix entries of a layer's feed-forward part that each token is multiplied with."""

    def window_of(self, layer: int) -> int | None:
        """Number of keys that a query of this layer attends to, itself among them; None: all before
        it.
        """
        return None

    def axis_sizes(self) -> dict[str, int]:
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            **self.feed_forward_axes(),
            "vocab": self.vocab,
        }

    def layer_flops(self, layer: int, seq_len: int) -> float:
        """FLOPs of one layer forward for one sequence."""
        q_width = self.heads * self.head_size
        kv_width = self.kv_heads * self.head_size
        linears = linear_flops(
            seq_len, 2 * self.dim * q_width, 2 * self.dim * kv_width, self.feed_forward_weights()
        )
        window = self.window_of(layer)
        return linears + attention_flops(seq_len, q_width, window=window)

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        layers = [self.layer_flops(layer, seq_len) for layer in range(self.layers)]
        outputs = self.labels or self.vocab
        return decoder_specs(dim=self.dim, outputs=outputs, seq_len=seq_len, layer_flops=layers)

    def linears(self) -> LinearShapes:
        widths = {
            "q_width": self.heads * self.head_size,
            "kv_width": self.kv_heads * self.head_size,
        }
        return in_layers(attention_linears(self.dim, **widths), range(self.layers))


class DenseConfig(DecoderConfig):
    """A decoder with a gated MLP in each layer."""

    ffn: int = Field(352, ge=1, description="width of the feed-forward layer")

    def feed_forward_axes(self) -> dict[str, int]:
        return {"ffn": self.ffn}

    def feed_forward_weights(self) -> int:
        return 3 * self.dim * self.ffn

    def linears(self) -> LinearShapes:
        mlp = in_layers(gated_linears(self.dim, self.ffn), range(self.layers))
        return {**super().linears(), **mlp}


class FullWidthConfig(DenseConfig):
    """A dense decoder whose query heads fill the width: head size = dim / heads."""

    heads: int = Field(4, ge=1, description="query heads; divides dim")

    @field_validator("heads")
    @classmethod
    def _heads_divide_dim(cls, heads: int, info: ValidationInfo) -> int:
        dim = info.data.get("dim")
        if dim is None:
            return heads
        check_divides(dim, heads, value_name="dim", parts_name="heads", multiple=2)
        head_size = dim // heads
        if head_size % 2:
            raise ValueError(
                f"dim {dim} / heads {heads} = head size {head_size}, RoPE needs pairs; try dim {2 * dim}"
            )
        return heads

    @property
    def head_size(self) -> int:
        return self.dim // self.heads


def check_at_most(value: int, most: int, *, of: str) -> int:
    """`value` if it is at most `most`.

    Raises:
        ValueError: for pydantic, which adds the key.
    """
    if value > most:
        raise ValueError(f"{value} of {most} {of}; try {most} or less")
    return value


def attention_flops(seq_len: int, width: int, *, window: int | None) -> float:
    """FLOPs of q k^T and of p v, `width` = heads x head size, for the pairs inside the causal mask
    and the window.
    """
    if window is None or window >= seq_len:
        return causal_attention_flops(seq_len, width)
    num_pairs = window * seq_len - window * window / 2
    return 4.0 * width * num_pairs


def decoder_specs(
    *,
    dim: int,
    outputs: int,
    seq_len: int,
    layer_flops: Sequence[float],
    side_flops: Mapping[str, float] | None = None,
) -> tuple[BlockSpec, ...]:
    """Specs of the chain "embed", "layer0", ..., side blocks, "head", "loss".

    Args:
        outputs: of the head: the vocabulary, or labels.
    """
    hidden = ("batch", "seq", dim)
    logits = ("batch", "seq", outputs)
    specs = [BlockSpec("embed", 0.0, hidden, is_layer=False)]
    for layer, flops in enumerate(layer_flops):
        layer_spec = BlockSpec(f"layer{layer}", flops, hidden, is_layer=True)
        specs.append(layer_spec)
    for name, flops in (side_flops or {}).items():
        side_spec = BlockSpec(name, flops, hidden, is_layer=False)
        specs.append(side_spec)
    head_flops = linear_flops(seq_len, dim * outputs)
    head = BlockSpec("head", head_flops, logits, is_layer=False)
    loss = BlockSpec("loss", 0.0, (), is_layer=False)
    return (*specs, head, loss)


DECODER_AXES: AxisTable = {
    "embed.tok.weight": ("vocab", "embed"),
    "layer*.attn.q.weight": ("heads", "embed"),
    "layer*.attn.[kv].weight": ("kv_heads", "embed"),
    "layer*.attn.o.weight": ("embed", "heads"),
    "layer*.attn_norm.weight": ("norm",),
    "layer*.mlp_norm.weight": ("norm",),
    "head.norm.weight": ("norm",),
    "head.proj.weight": ("vocab", "embed"),
    "head.score.weight": ("labels", "embed"),
}
"""Logical axes of all but the feed-forward part; families add the rows below that apply to them."""

GATED_MLP_AXES: AxisTable = {
    "layer*.mlp.gate.weight": ("ffn", "embed"),
    "layer*.mlp.up.weight": ("ffn", "embed"),
    "layer*.mlp.down.weight": ("embed", "ffn"),
}
QK_NORM_AXES: AxisTable = {"layer*.attn.[qk]_norm.weight": ("head_size",)}
QKV_BIAS_AXES: AxisTable = {
    "layer*.attn.q.bias": ("heads",),
    "layer*.attn.[kv].bias": ("kv_heads",),
}


def decoder_ties(cfg: DecoderConfig) -> dict[str, str]:
    """Alias -> owner: with `tied`, the head projects with the token embedding."""
    is_tied = cfg.tied and not cfg.labels
    return {"head.proj.weight": "embed.tok.weight"} if is_tied else {}


def residual_std(num_layers: int) -> float:
    """Standard deviation of projections onto the residual stream (Radford et al. 2019, section
    2.3).
    """
    return INIT_STD / math.sqrt(2 * num_layers)


def decoder_init(cfg: DecoderConfig) -> dict[str, Draw]:
    """Starting values of all but the feed-forward part: normal; projections onto the residual
    stream are scaled.
    """
    return {
        "embed.tok.weight": ("normal", INIT_STD),
        "layer*.attn.[qkv].weight": ("normal", INIT_STD),
        "layer*.attn.o.weight": ("normal", residual_std(cfg.layers)),
        "*norm.weight": ("ones",),
        "head.proj.weight": ("normal", INIT_STD),
        "head.score.weight": ("normal", INIT_STD),
    }


def gated_mlp_init(cfg: DecoderConfig) -> dict[str, Draw]:
    """Starting values of a gated MLP."""
    return {
        "layer*.mlp.gate.weight": ("normal", INIT_STD),
        "layer*.mlp.up.weight": ("normal", INIT_STD),
        "layer*.mlp.down.weight": ("normal", residual_std(cfg.layers)),
    }


def dense_init(cfg: DenseConfig) -> dict[str, Draw]:
    """Starting values of a decoder with gated MLPs."""
    return {**decoder_init(cfg), **gated_mlp_init(cfg)}
