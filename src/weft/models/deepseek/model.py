"""The blocks of DeepSeek-V2 and V3: multi-head latent attention, dense and mixed layers, multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch, Extra, chain
from weft.models.common.decoder import chain_builders
from weft.models.common.experts import Experts
from weft.models.common.head_output import LOGITS, HeadOutput
from weft.models.common.layers import DecoderLayer, Embed, Head, Loss, RegionInput, SwiGLU
from weft.models.common.lazy_blocks import Builder, Builders, build_all
from weft.models.common.moe import Choice, MoE, MoELayer, Router
from weft.models.common.rope import Rope, YarnScaling, rotate
from weft.models.deepseek.config import Config

LATENT_EPS = 1e-6
"""Added to the mean square of latents, as in DeepSeek's and transformers' code: `rms_norm_eps` is of
all other norms.
"""


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): low-rank queries, keys and
    values, decoupled RoPE.

    Keys and values all come from one small latent vector a token, and queries from another. A head
    of q and k has a part without position and a part that is rotated; the rotated part of k is one
    for all heads:

        x ── q_a ── norm ── q_b ──────────── q: nope │ rope↻   per head
        x ─┬ kv_a ─ norm ── kv_b ─┬───────── k: nope │ rope↻   rope part shared
           └────── rope part ─────┼────────────────────↑
                                  └───────── v

    With `q_lora_rank` 0 the queries come from x directly (`q`). Scores are multiplied by `scale`.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        rope: Rope,
        scale: float,
    ) -> None:
        super().__init__()
        self.rope = rope
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.nope_size = qk_nope_head_dim
        self.rope_size = rope.head_size
        self.v_size = v_head_dim
        q_width = heads * (self.nope_size + self.rope_size)
        self.region_input = RegionInput()
        if q_lora_rank:
            self.q_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(q_lora_rank, eps=LATENT_EPS)
            self.q_b = nn.Linear(q_lora_rank, q_width, bias=False)
        else:
            self.q = nn.Linear(dim, q_width, bias=False)
        self.kv_a = nn.Linear(dim, kv_lora_rank + self.rope_size, bias=False)
        self.kv_a_norm = nn.RMSNorm(kv_lora_rank, eps=LATENT_EPS)
        self.kv_b = nn.Linear(kv_lora_rank, heads * (self.nope_size + self.v_size), bias=False)
        self.o = nn.Linear(heads * self.v_size, dim, bias=False)
        self.attend = Attend(scale=scale)

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        turn = self.rope(batch.positions)
        x_BSD = self.region_input(x_BSD)
        q_BSHK = self._queries(x_BSD, turn)
        k_BSHK, v_BSHK = self._keys_and_values(x_BSD, turn)
        attended = self.attend(q_BSHK, k_BSHK, v_BSHK, batch)
        out_BSD: Tensor = self.o(attended.flatten(2))
        return out_BSD

    def _queries(self, x_BSD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        if self.q_lora_rank:
            latent = self.q_a_norm(self.q_a(x_BSD))
            q = self.q_b(latent)
        else:
            q = self.q(x_BSD)
        q_BSHK = q.unflatten(-1, (-1, self.nope_size + self.rope_size))
        nope, to_rotate = q_BSHK.split((self.nope_size, self.rope_size), dim=-1)
        rotated = rotate(to_rotate, turn, pairs="neighbours")
        return torch.cat((nope, rotated), dim=-1)

    def _keys_and_values(self, x_BSD: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        compressed = self.kv_a(x_BSD)
        sizes = (self.kv_lora_rank, self.rope_size)
        latent, to_rotate = compressed.split(sizes, dim=-1)
        kv = self.kv_b(self.kv_a_norm(latent))
        sizes = (self.nope_size, self.v_size)
        kv_BSHK = kv.unflatten(-1, (-1, sum(sizes)))
        nope_BSHK, v_BSHK = kv_BSHK.split(sizes, dim=-1)
        to_rotate_BS1K = to_rotate.unsqueeze(2)
        rotated = rotate(to_rotate_BS1K, turn, pairs="neighbours")
        num_heads = nope_BSHK.shape[2]
        rotated_BSHK = rotated.expand(-1, -1, num_heads, -1)
        k_BSHK = torch.cat((nope_BSHK, rotated_BSHK), dim=-1)
        return k_BSHK, v_BSHK


class SecondNext(nn.Module):
    """Multi-token prediction (DeepSeek-V3, section 2.2): a side block that predicts the token after
    the next one.

    Returns x unchanged and adds `weight` times the summed loss of that prediction. The head's input
    for a token and the embedding of the next token, each behind a norm of its own, are joined and
    pass one more layer of the model. `tok`, `last_norm` and `proj` are tied to the model's
    embedding, last norm and head. Needs a batch of `with_later_targets`.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        vocab: int,
        dim: int,
        padding_id: int | None,
        norm_eps: float,
        weight: float,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.tok = nn.Embedding(vocab, dim, padding_id)
        self.last_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.x_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.next_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.layer = layer
        self.proj = nn.Linear(dim, vocab, bias=False)
        self.loss = Loss()
        self.head_output: HeadOutput = LOGITS

    def forward(self, x_BSD: Tensor, batch: Batch) -> Extra:
        joined_BSD = self._join(x_BSD, batch)
        out = chain({"layer": self.layer}, joined_BSD, batch)
        assert batch.later_targets is not None, "with_later_targets fills both fields"
        later_batch = replace(batch, targets=batch.later_targets)
        output = self.head_output(self.proj, self.norm(out.x), later_batch)
        loss = self.weight * self.loss(output, later_batch)
        if out.loss is not None:
            loss = loss + out.loss
        return Extra(x_BSD, loss, out.loads.get("layer"))

    def _join(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        assert batch.next_inputs is not None, (
            "multi-token prediction reads a batch made by with_later_targets"
        )
        next_BSD = self.next_norm(self.tok(batch.next_inputs))
        this_BSD = self.x_norm(self.last_norm(x_BSD))
        joined_BSD: Tensor = self.join(torch.cat((next_BSD, this_BSD), dim=-1))
        return joined_BSD


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    dense, mixed = partial(_dense_layer, cfg), partial(_mixed_layer, cfg)
    layers: list[Builder] = [
        dense if index < cfg.first_k_dense else mixed for index in range(cfg.layers)
    ]
    side_blocks = {f"mtp{i}": partial(_second_next, cfg) for i in range(cfg.mtp_depth)}
    embed = partial(Embed, cfg.vocab, cfg.dim, padding_id=cfg.padding_id)
    return chain_builders(embed, layers, partial(_head, cfg), side_blocks=side_blocks)


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "mtp0" if there is one, "head", "loss"."""
    return build_all(builders(cfg))


def _head(cfg: Config) -> Head:
    return Head(_norm(cfg), nn.Linear(cfg.dim, cfg.vocab, bias=False))


def _norm(cfg: Config) -> nn.RMSNorm:
    return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)


def _dense_layer(cfg: Config) -> DecoderLayer:
    return DecoderLayer(
        attn_norm=_norm(cfg),
        attn=_attention(cfg),
        mlp_norm=_norm(cfg),
        mlp=SwiGLU(cfg.dim, cfg.ffn),
    )


def _mixed_layer(cfg: Config) -> MoELayer:
    return MoELayer(
        attn_norm=_norm(cfg), attn=_attention(cfg), mlp_norm=_norm(cfg), mlp=_mixture(cfg)
    )


def _second_next(cfg: Config) -> SecondNext:
    return SecondNext(
        _mixed_layer(cfg),
        vocab=cfg.vocab,
        dim=cfg.dim,
        padding_id=cfg.padding_id,
        norm_eps=cfg.norm_eps,
        weight=cfg.mtp_loss,
    )


def _attention(cfg: Config) -> LatentAttention:
    yarn = YarnScaling(
        factor=cfg.rope_scaling_factor,
        theta=cfg.rope_theta,
        original_context=cfg.rope_scaling_original_context,
        beta_fast=cfg.rope_scaling_beta_fast,
        beta_slow=cfg.rope_scaling_beta_slow,
        mscale=cfg.rope_scaling_mscale,
        mscale_all_dim=cfg.rope_scaling_mscale_all_dim,
    )
    rope = Rope(
        cfg.qk_rope_head_dim, theta=cfg.rope_theta, scaling=None if yarn.factor == 1 else yarn
    )
    return LatentAttention(
        cfg.dim,
        heads=cfg.heads,
        q_lora_rank=cfg.q_lora_rank,
        kv_lora_rank=cfg.kv_lora_rank,
        qk_nope_head_dim=cfg.qk_nope_head_dim,
        v_head_dim=cfg.v_head_dim,
        rope=rope,
        scale=cfg.qk_head_dim**-0.5 * yarn.sharpness,
    )


def _mixture(cfg: Config) -> MoE:
    choice = Choice(
        num_experts=cfg.experts,
        top_k=cfg.top_k,
        scoring=cfg.scoring,
        n_group=cfg.n_group,
        topk_group=cfg.topk_group,
        norm_topk_prob=cfg.norm_topk_prob,
        routed_scaling_factor=cfg.routed_scaling_factor,
    )
    return MoE(
        router=Router(cfg.dim, choice, rate=cfg.balance_rate),
        experts=Experts(cfg.dim, cfg.expert_ffn, num_experts=cfg.experts),
        shared=SwiGLU(cfg.dim, cfg.shared_ffn) if cfg.shared_experts else None,
        balance_weight=cfg.balance_loss,
    )
