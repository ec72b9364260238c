"""DeepSeek-V2 and V3 (Liu et al. 2024): latent attention, leading dense layers, shared and routed experts."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import (
    AxisTable,
    BlockSpec,
    Draw,
    InputKind,
    LinearShapes,
    ModelConfig,
    causal_attention_flops,
    check_divides,
    gated_linears,
    in_layers,
    linear_flops,
)
from weft.models.common.decoder_config import (
    INIT_STD,
    PaddingId,
    check_at_most,
    decoder_specs,
    residual_std,
)


class Config(ModelConfig):
    """DeepSeek's shape; the defaults are deepseek-tiny."""

    family: ClassVar[str] = "deepseek"
    kind: ClassVar[InputKind] = "tokens"

    layers: int = Field(4, ge=1, description="transformer layers")
    first_k_dense: int = Field(1, ge=0, description="leading layers with a dense feed-forward part")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    heads: int = Field(4, ge=1, description="attention heads")
    q_lora_rank: int = Field(
        64, ge=0, description="width of the vector that queries come from; 0 for x itself"
    )
    kv_lora_rank: int = Field(
        32, ge=1, description="width of the vector that keys and values come from"
    )
    qk_nope_head_dim: int = Field(
        32, ge=1, description="part of a head of q and k that is not rotated"
    )
    qk_rope_head_dim: int = Field(
        16, ge=2, multiple_of=2, description="part of a head of q and k that is rotated"
    )
    v_head_dim: int = Field(32, ge=1, description="width of a head of v")
    ffn: int = Field(384, ge=1, description="width of the feed-forward part of a dense layer")
    experts: int = Field(8, ge=1, description="routed experts of each other layer")
    top_k: int = Field(2, ge=1, description="routed experts that each token visits")
    expert_ffn: int = Field(64, ge=1, description="width of an expert")
    shared_experts: int = Field(1, ge=0, description="experts that every token visits")
    scoring: Literal["sigmoid", "softmax"] = Field(
        "sigmoid", description="of experts: with a balancing bias, or without"
    )
    n_group: int = Field(1, ge=1, description="groups of experts; divides experts")
    topk_group: int = Field(1, ge=1, description="groups that a token's experts may be in")
    norm_topk_prob: bool = Field(
        True, description="weights of a token's experts sum to 1 before scaling"
    )
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor of those weights")
    balance_rate: float = Field(1e-3, ge=0, description="step of the balancing bias")
    balance_loss: float = Field(
        1e-4, ge=0, description="weight of the sequence-wise balance loss; 0 for none"
    )
    mtp_depth: int = Field(
        0, ge=0, le=1, description="1 to predict the token after the next one, too"
    )
    mtp_loss: float = Field(0.3, ge=0, description="weight of that prediction's loss")
    vocab: int = Field(256, ge=1, description="entries of the vocabulary; 256 for bytes")
    padding_id: PaddingId = None
    max_seq_len: int = Field(
        4096, ge=1, description="context length of the published model; informational"
    )
    norm_eps: float = Field(1e-6, gt=0, description="added to the mean square in RMSNorm")
    rope_theta: float = Field(10_000.0, gt=1, description="base of RoPE's wavelengths")
    rope_scaling_factor: float = Field(
        1.0, ge=1, description="YaRN: long wavelengths grow by this; 1 turns it off"
    )
    rope_scaling_original_context: int = Field(
        4096, ge=1, description="context before scaling, in tokens"
    )
    rope_scaling_beta_fast: float = Field(
        32.0, gt=0, description="features that turn so often in that context stay"
    )
    rope_scaling_beta_slow: float = Field(
        1.0, gt=0, description="features that turn so often or less are scaled"
    )
    rope_scaling_mscale: float = Field(
        1.0, ge=0, description="growth of the rotated part with log(factor)"
    )
    rope_scaling_mscale_all_dim: float = Field(
        1.0, ge=0, description="growth of all scores with log(factor)"
    )

    @field_validator("first_k_dense")
    @classmethod
    def _dense_layers_are_layers(cls, first_k_dense: int, info: ValidationInfo) -> int:
        return check_at_most(first_k_dense, info.data.get("layers", first_k_dense), of="layers")

    @field_validator("top_k")
    @classmethod
    def _top_k_exist(cls, top_k: int, info: ValidationInfo) -> int:
        return check_at_most(top_k, info.data.get("experts", top_k), of="experts")

    @field_validator("n_group")
    @classmethod
    def _groups_divide_experts(cls, n_group: int, info: ValidationInfo) -> int:
        if "experts" in info.data:
            check_divides(info.data["experts"], n_group, value_name="experts", parts_name="n_group")
        return n_group

    @field_validator("topk_group")
    @classmethod
    def _groups_hold_top_k(cls, topk_group: int, info: ValidationInfo) -> int:
        if not {"experts", "top_k", "n_group"} <= info.data.keys():
            return topk_group
        experts = info.data["experts"]
        top_k = info.data["top_k"]
        n_group = info.data["n_group"]
        if topk_group > n_group:
            raise ValueError(f"{topk_group} of n_group {n_group} groups; try {n_group} or less")
        reachable = topk_group * experts // n_group
        if top_k > reachable:
            need = -(-top_k * n_group // experts)
            raise ValueError(
                f"{topk_group} groups hold {reachable} experts, top_k is {top_k}; "
                f"try top_k {reachable}, or topk_group {need}"
            )
        return topk_group

    @field_validator("rope_scaling_beta_slow")
    @classmethod
    def _slow_is_below_fast(cls, slow: float, info: ValidationInfo) -> float:
        fast = info.data.get("rope_scaling_beta_fast", math.inf)
        if slow >= fast:
            raise ValueError(f"{slow} is not below rope_scaling_beta_fast {fast}; try {fast / 32}")
        return slow

    @property
    def reads_later_targets(self) -> bool:
        return self.mtp_depth > 0

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_ffn(self) -> int:
        """Width of the shared experts, which are computed as one."""
        return self.shared_experts * self.expert_ffn

    @property
    def num_mixed_layers(self) -> int:
        """Layers with a mixture of experts, that of multi-token prediction among them."""
        return self.layers - self.first_k_dense + self.mtp_depth

    def axis_sizes(self) -> dict[str, int]:
        dense = self.ffn if self.first_k_dense else 0
        mixed = self.expert_ffn if self.num_mixed_layers else 0
        return {
            "heads": self.heads,
            "ffn": math.gcd(dense, mixed),
            "experts": self.experts,
            "vocab": self.vocab,
        }

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        attention = self._attention_flops(seq_len)
        dense = attention + linear_flops(seq_len, 3 * self.dim * self.ffn)
        visited_width = self.top_k * self.expert_ffn + self.shared_ffn
        mixed = attention + linear_flops(
            seq_len, self.dim * self.experts, 3 * self.dim * visited_width
        )
        num_mixed = self.layers - self.first_k_dense
        head = linear_flops(seq_len, self.dim * self.vocab)
        mtp = linear_flops(seq_len, 2 * self.dim * self.dim) + mixed + head
        return decoder_specs(
            dim=self.dim,
            outputs=self.vocab,
            seq_len=seq_len,
            layer_flops=[dense] * self.first_k_dense + [mixed] * num_mixed,
            side_flops={f"mtp{i}": mtp for i in range(self.mtp_depth)},
        )

    def linears(self) -> LinearShapes:
        layers = range(self.layers)
        dense_layers = layers[: self.first_k_dense]
        mixed_layers = layers[self.first_k_dense :]
        found = in_layers(self._attention_linears(), layers)
        found.update(in_layers(gated_linears(self.dim, self.ffn), dense_layers))
        if self.shared_experts:
            found.update(
                in_layers(
                    gated_linears(self.dim, self.shared_ffn, inside="mlp.shared"), mixed_layers
                )
            )
        return found

    def expert_linears(self) -> LinearShapes:
        own = gated_linears(self.dim, self.expert_ffn, inside="mlp.experts")
        return in_layers(own, range(self.first_k_dense, self.layers))

    def _attention_linears(self) -> LinearShapes:
        q_width = self.heads * self.qk_head_dim
        kv_width = self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        v_width = self.heads * self.v_head_dim
        found: LinearShapes = {}
        if self.q_lora_rank:
            found["attn.q_a"] = (self.q_lora_rank, self.dim)
            found["attn.q_b"] = (q_width, self.q_lora_rank)
        else:
            found["attn.q"] = (q_width, self.dim)
        found["attn.kv_a"] = (self.kv_lora_rank + self.qk_rope_head_dim, self.dim)
        found["attn.kv_b"] = (kv_width, self.kv_lora_rank)
        found["attn.o"] = (self.dim, v_width)
        return found

    def _attention_flops(self, seq_len: int) -> float:
        q_width = self.heads * self.qk_head_dim
        v_width = self.heads * self.v_head_dim
        weights = [size_out * size_in for size_out, size_in in self._attention_linears().values()]
        scores = causal_attention_flops(seq_len, q_width) / 2
        values = causal_attention_flops(seq_len, v_width) / 2
        return linear_flops(seq_len, *weights) + scores + values


def _published(**own: Any) -> Config:
    """The fields that V2 and V3 share: heads, latent vector, YaRN from 4096 to 163,840 tokens."""
    heads: dict[str, Any] = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return Config(**heads, max_seq_len=163_840, rope_scaling_factor=40.0, **own)


PRESETS = {
    "deepseek-tiny": Config(),
    "deepseek-16b": _published(  # DeepSeek-V2-Lite
        layers=27,
        first_k_dense=1,
        dim=2048,
        heads=16,
        q_lora_rank=0,
        ffn=10_944,
        experts=64,
        top_k=6,
        expert_ffn=1408,
        shared_experts=2,
        scoring="softmax",
        norm_topk_prob=False,
        balance_loss=1e-3,
        vocab=102_400,
        rope_scaling_mscale=0.707,
        rope_scaling_mscale_all_dim=0.707,
    ),
    "deepseek-v3-671b": _published(  # with mtp_depth 1 it has the 14B for multi-token prediction, too
        layers=61,
        first_k_dense=3,
        dim=7168,
        heads=128,
        q_lora_rank=1536,
        ffn=18_432,
        experts=256,
        top_k=8,
        expert_ffn=2048,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        vocab=129_280,
    ),
}

AXES: AxisTable = {
    "embed.tok.weight": ("vocab", "embed"),
    "*.attn.q.weight": ("heads", "embed"),
    "*.attn.*[qv]_a.weight": ("latent", "embed"),
    "*.attn.*[qv]_b.weight": ("heads", "latent"),
    "*.attn.o.weight": ("embed", "heads"),
    "*.gate.weight": ("ffn", "embed"),
    "*.up.weight": ("ffn", "embed"),
    "*.down.weight": ("embed", "ffn"),
    "*.router.proj.weight": ("router_experts", "embed"),
    "*.router.bias": ("router_experts",),
    "*.experts.gate": ("experts", "ffn", "embed"),
    "*.experts.up": ("experts", "ffn", "embed"),
    "*.experts.down": ("experts", "embed", "ffn"),
    "*norm.weight": ("norm",),
    "mtp?.tok.weight": ("vocab", "embed"),
    "mtp?.join.weight": ("embed", "pair"),
    "mtp?.proj.weight": ("vocab", "embed"),
    "head.proj.weight": ("vocab", "embed"),
}


def ties(cfg: Config) -> dict[str, str]:
    """Alias -> owner: multi-token prediction reads and predicts with the model's own embedding,
    last norm and head.
    """
    owners = {"tok": "embed.tok", "last_norm": "head.norm", "proj": "head.proj"}
    ties = {}
    for i in range(cfg.mtp_depth):
        for alias, owner in owners.items():
            ties[f"mtp{i}.{alias}.weight"] = f"{owner}.weight"
    return ties


def init(cfg: Config) -> dict[str, Draw]:
    """Normal; projections onto the residual stream are scaled by 1 / sqrt(2 x layers)."""
    residual = residual_std(cfg.layers)
    return {
        "*.tok.weight": ("normal", INIT_STD),
        "*.attn.q.weight": ("normal", INIT_STD),
        "*.attn.*[qv]_[ab].weight": ("normal", INIT_STD),
        "*.attn.o.weight": ("normal", residual),
        "*.gate.weight": ("normal", INIT_STD),
        "*.up.weight": ("normal", INIT_STD),
        "*.down.weight": ("normal", residual),
        "*.router.proj.weight": ("normal", INIT_STD),
        "*.router.bias": ("zeros",),
        "*.experts.gate": ("normal", INIT_STD),
        "*.experts.up": ("normal", INIT_STD),
        "*.experts.down": ("normal", residual),
        "*norm.weight": ("ones",),
        "mtp?.join.weight": ("normal", INIT_STD),
        "mtp?.proj.weight": ("normal", INIT_STD),
        "head.proj.weight": ("normal", INIT_STD),
    }
