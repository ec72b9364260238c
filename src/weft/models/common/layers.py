"""Owns the layers that language models share; parallel code swaps the seams `Attend` and `Loss`, nothing else.

No layer knows how many heads or features it has: it counts what its weights hold, so cut weights just work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.batch import IGNORE, Batch
from weft.models.common.rope import Rope, rotate


class Attend(nn.Module):
    """Seam: causal attention of each token to its own document. H query heads share G key/value heads, H / G each.

    Scores are q k^T times `scale`, 1 / sqrt(head size) where it is None. Heads of v may have another size than those of q and k.
    """

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, batch: Batch) -> Tensor:
        width, missing = v_BSGK.shape[-1], k_BSGK.shape[-1] - v_BSGK.shape[-1]
        if missing > 0:  # fused kernels want equal head sizes; without one an S x S square is held
            v_BSGK = F.pad(v_BSGK, (0, missing))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
        mask = None if batch.documents is None else document_mask(batch.documents)
        out_BHSK = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out_BHSK.transpose(1, 2)[..., :width]


def document_mask(documents_BS: Tensor) -> Tensor:
    """True where a token (row) may look: at itself and earlier tokens of its document; [B, 1, S, S]."""
    same = documents_BS[:, None, :, None] == documents_BS[:, None, None, :]
    return same.tril()


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023).

    With `qk_norm_eps` each head of q and k is normalised before it is rotated (Dehghani et al. 2023, as in Qwen3).
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        bias: bool = False,
        rope: Rope | None = None,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.q = nn.Linear(dim, heads * head_size, bias=bias)
        self.k = nn.Linear(dim, kv_heads * head_size, bias=bias)
        self.v = nn.Linear(dim, kv_heads * head_size, bias=bias)
        self.o = nn.Linear(heads * head_size, dim, bias=bias)
        self.q_norm, self.k_norm = _head_norm(head_size, qk_norm_eps), _head_norm(head_size, qk_norm_eps)
        self.rope = rope
        self.attend = Attend()

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        q, k, v = (linear(x_BSD).unflatten(-1, (-1, self.head_size)) for linear in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            turn = self.rope(batch.positions)
            q, k = rotate(q, turn), rotate(k, turn)
        out_BSD: Tensor = self.o(self.attend(q, k, v, batch).flatten(2))
        return out_BSD


def _head_norm(head_size: int, eps: float | None) -> nn.Module:
    return nn.Identity() if eps is None else nn.RMSNorm(head_size, eps=eps)


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each behind its norm and beside a residual."""

    def __init__(self, *, attn_norm: nn.Module, attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), batch)
        out_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return out_BSD


class Embed(nn.Module):
    """Tokens to vectors."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)

    def forward(self, tokens_BS: Tensor, batch: Batch) -> Tensor:
        x_BSD: Tensor = self.tok(tokens_BS)
        return x_BSD


class EmbedWithPositions(nn.Module):
    """Tokens to vectors, plus a learned vector for each position."""

    def __init__(self, vocab: int, dim: int, *, max_seq_len: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_seq_len, dim)

    def forward(self, tokens_BS: Tensor, batch: Batch) -> Tensor:
        x_BSD: Tensor = self.tok(tokens_BS) + self.pos(batch.positions)
        return x_BSD


class Head(nn.Module):
    """The last norm and the projection to logits_BSV."""

    def __init__(self, norm: nn.Module, proj: nn.Linear) -> None:
        super().__init__()
        self.norm, self.proj = norm, proj

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        logits_BSV: Tensor = self.proj(self.norm(x_BSD))
        return logits_BSV


class Loss(nn.Module):
    """Seam: sum of the cross entropy over the targets that count, in float32 (float64 for a float64 model)."""

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
