"""Layers that language models share; parallel code changes `Attend` (models/common/attention.py) and `Loss`, nothing else.

No layer stores its number of heads or features: it reads the shapes of its weights, so sharded
weights work unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.head_output import LOGITS, HeadOutput
from weft.models.common.rope import Rope, rotate


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023).

    `q_norm` and `k_norm` normalise each head of q and k before it is rotated (Dehghani et al. 2023,
    as in Qwen3). `attend` declares what the attention requires (mask, scale, soft-cap, sinks,
    bias); default: causal, within documents. `dropout` is that of the output.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rope: Rope | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        attend: Attend | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        q_width = heads * head_size
        kv_width = kv_heads * head_size
        self.q = nn.Linear(dim, q_width, bias=qkv_bias)
        self.k = nn.Linear(dim, kv_width, bias=qkv_bias)
        self.v = nn.Linear(dim, kv_width, bias=qkv_bias)
        self.o = nn.Linear(q_width, dim, bias=out_bias)
        self.region_input = RegionInput()
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.rope = rope
        self.attend = attend or Attend()
        self.dropout = dropout

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        x_BSD = self.region_input(x_BSD)
        q_BSHK = self._by_head(self.q(x_BSD))
        k_BSGK = self._by_head(self.k(x_BSD))
        v_BSGK = self._by_head(self.v(x_BSD))
        q_BSHK = self.q_norm(q_BSHK)
        k_BSGK = self.k_norm(k_BSGK)
        if self.rope is not None:
            turn = self.rope(batch.positions)
            q_BSHK = rotate(q_BSHK, turn)
            k_BSGK = rotate(k_BSGK, turn)
        attended = self.attend(q_BSHK, k_BSGK, v_BSGK, batch)
        out_BSD: Tensor = self.o(attended.flatten(2))
        if self.dropout:
            out_BSD = F.dropout(out_BSD, self.dropout, self.training)
        return out_BSD

    def _by_head(self, x: Tensor) -> Tensor:
        """[..., heads x K] -> [..., heads, K]; heads are counted, so that shards work, too."""
        by_head: Tensor = x.unflatten(-1, (-1, self.head_size))
        return by_head


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.silu(self.gate(x))
        hidden = activated * self.up(x)
        out: Tensor = self.down(hidden)
        return out


class Layer(nn.Module):
    """The parts of a layer: attention and a feed-forward part, each with its norm."""

    def __init__(
        self, *, attn_norm: nn.Module, attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def add_attention(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        """x plus attention of its norm."""
        normed = self.attn_norm(x_BSD)
        attended: Tensor = self.attn(normed, batch)
        return x_BSD + attended


class DecoderLayer(Layer):
    """One layer: attention and MLP, each behind its norm and beside a residual."""

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        x_BSD = self.add_attention(x_BSD, batch)
        normed = self.mlp_norm(x_BSD)
        out_BSD: Tensor = x_BSD + self.mlp(normed)
        return out_BSD


class Embed(nn.Module):
    """Tokens to vectors.

    Args:
        padding_id: a token whose vector gets no gradient; negative ones count from the end.
    """

    def __init__(self, vocab: int, dim: int, *, padding_id: int | None = None) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim, padding_id)

    def forward(self, tokens_BS: Tensor, batch: Batch) -> Tensor:
        x_BSD: Tensor = self.tok(tokens_BS)
        return x_BSD


class Head(nn.Module):
    """The last norm and the projection to logits_BSV.

    Attributes:
        head_output: what it hands to the loss; in place of logits it may be losses_BS.
    """

    def __init__(self, norm: nn.Module, proj: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.proj = proj
        self.head_output: HeadOutput = LOGITS

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        return self.head_output(self.proj, self.norm(x_BSD), batch)


class ScoreHead(nn.Module):
    """The last norm and scores_BSL of each token, for its label or as a reward; the loss reads those
    of the last token of each text, and so those of whole sequences.
    """

    may_gather_sequence = True

    def __init__(self, norm: nn.Module, score: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.score = score

    @property
    def trained_whole(self) -> nn.Module:
        """What adapters leave trained."""
        return self.score

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        scores_BSL: Tensor = self.score(self.norm(x_BSD))
        return scores_BSL


def head_of(norm: nn.Module, dim: int, *, vocab: int, labels: int) -> Head | ScoreHead:
    """The head of a language model, or one for labels."""
    if labels:
        return ScoreHead(norm, nn.Linear(dim, labels, bias=False))
    return Head(norm, nn.Linear(dim, vocab, bias=False))


class RegionInput(nn.Module):
    """Seam: where a tensor-parallel region begins, for a module whose sharded part starts before
    its first sharded linear.

    Identity on one device. What is computed from its result, up to the row-parallel linears,
    differs between tensor-parallel
    ranks: whole parameters used there (latent projections, a single key/value head for all queries)
        get partial gradients.
    Without it a region begins at the input of each column-parallel linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


class RegionOutput(nn.Module):
    """Seam: where a tensor-parallel region ends whose result is a sum of several partial ones (a
    mixture of experts).

    Identity on one device. A module with a `RegionInput` and a `RegionOutput` as children declares
    both ends of its region: linears in between neither enter nor leave one.
    """

    def forward(self, y: Tensor) -> Tensor:
        return y


class RegionHeads(nn.Module):
    """Seam: this rank's heads of a tensor that every rank has whole, inside a tensor-parallel region,
    such as the slopes of ALiBi.

    Identity on one device.
    """

    def forward(self, x: Tensor, dim: int, number: int) -> Tensor:
        """So many entries along `dim`, which has one for each head."""
        return x.narrow(dim, 0, number)


class Loss(nn.Module):
    """Seam: sum of the cross entropy over the targets that count, in float32 (float64 for a float64
    model).

    A subclass that computes another loss must override `requirements`, too: parallel
    implementations reject what they lack.
    """

    takes_token_losses = True

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute."""
        return frozenset({"cross_entropy"})

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        """logits_BSV, or the losses_BS of a head that computes them -> scalar."""
        if logits.dim() == batch.targets.dim():
            return logits.sum()
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(wide)
        return F.cross_entropy(
            logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
