"""Owns multi-head latent attention (DeepSeek-V2, Liu et al. 2024): low-rank queries, keys and values, decoupled RoPE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.common.rope import Rope, rotate


class LatentAttention(nn.Module):
    """Attention whose keys and values all come from one small latent vector a token, and queries from another.

    A head of q and k has a part without position and a part that is rotated; the rotated part of k is one for all heads:

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
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.rope, self.q_lora_rank, self.kv_lora_rank = rope, q_lora_rank, kv_lora_rank
        self.nope_size, self.rope_size, self.v_size = qk_nope_head_dim, rope.head_size, v_head_dim
        q_width = heads * (self.nope_size + self.rope_size)
        if q_lora_rank:
            self.q_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(q_lora_rank, eps=norm_eps)
            self.q_b = nn.Linear(q_lora_rank, q_width, bias=False)
        else:
            self.q = nn.Linear(dim, q_width, bias=False)
        self.kv_a = nn.Linear(dim, kv_lora_rank + self.rope_size, bias=False)
        self.kv_a_norm = nn.RMSNorm(kv_lora_rank, eps=norm_eps)
        self.kv_b = nn.Linear(kv_lora_rank, heads * (self.nope_size + self.v_size), bias=False)
        self.o = nn.Linear(heads * self.v_size, dim, bias=False)
        self.attend = Attend(scale=scale)

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        turn = self.rope(batch.positions)
        q_BSHK, k_BSHK, v_BSHK = self._queries(x_BSD, turn), *self._keys_and_values(x_BSD, turn)
        out_BSD: Tensor = self.o(self.attend(q_BSHK, k_BSHK, v_BSHK, batch).flatten(2))
        return out_BSD

    def _queries(self, x_BSD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_b(self.q_a_norm(self.q_a(x_BSD))) if self.q_lora_rank else self.q(x_BSD)
        q_BSHK = q.unflatten(-1, (-1, self.nope_size + self.rope_size))
        nope, turned = q_BSHK.split((self.nope_size, self.rope_size), dim=-1)
        return torch.cat((nope, rotate(turned, turn, pairs="neighbours")), dim=-1)

    def _keys_and_values(self, x_BSD: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        latent, turned = self.kv_a(x_BSD).split((self.kv_lora_rank, self.rope_size), dim=-1)
        kv_BSHK = self.kv_b(self.kv_a_norm(latent)).unflatten(-1, (-1, self.nope_size + self.v_size))
        nope, v_BSHK = kv_BSHK.split((self.nope_size, self.v_size), dim=-1)
        shared = rotate(turned.unsqueeze(2), turn, pairs="neighbours").expand(-1, -1, nope.shape[2], -1)
        return torch.cat((nope, shared), dim=-1), v_BSHK
