"""x-transformers: a decoder of layer triples in loops, ALiBi, memory tokens, GEGLU, einsums, masks by torch.finfo."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import einsum, nn

from weft import Stacked  # weft


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


def max_neg_value(tensor):
    return -torch.finfo(tensor.dtype).max


def split_heads(t, dim_head):  # weft
    b, n, _ = t.shape
    return t.reshape(b, n, -1, dim_head).transpose(1, 2)  # weft


class AlibiPositionalBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        slopes = torch.tensor(self._get_slopes(heads)).view(-1, 1, 1)
        self.slopes = nn.Parameter(slopes, requires_grad=False)  # weft

    @staticmethod
    def _get_slopes(heads):
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]

    def forward(self, i, j):
        i_arange = torch.arange(j - i, j, device=self.slopes.device)
        j_arange = torch.arange(j, device=self.slopes.device)
        bias = -torch.abs(j_arange[None, None, :] - i_arange[None, :, None])
        return bias * self.slopes


class ScaleNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5
        self.g = nn.Parameter(torch.ones(1) * (dim**-0.5))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class GLU(nn.Module):
    def __init__(self, dim_in, dim_out, activation):
        super().__init__()
        self.act = activation
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class FeedForward(nn.Module):
    def __init__(self, dim, mult=4, dropout=0.0):
        super().__init__()
        inner_dim = int(dim * mult)
        self.ff = nn.Sequential(
            GLU(dim, inner_dim, nn.GELU()), nn.Dropout(dropout), nn.Linear(inner_dim, dim)
        )

    def forward(self, x):
        return self.ff(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, dim_head, dropout=0.0):
        super().__init__()
        self.dim_head, self.scale = dim_head, dim_head**-0.5  # weft
        inner = heads * dim_head
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_k = nn.Linear(dim, inner, bias=False)
        self.to_v = nn.Linear(dim, inner, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.rel_pos = AlibiPositionalBias(heads)
        self.attn_fn = partial(F.softmax, dim=-1)

    def forward(self, x):
        d = self.dim_head  # weft
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        q, k, v = (split_heads(t, d) for t in (q, k, v))  # weft
        dots = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        i, j = dots.shape[-2:]
        dots = dots + self.rel_pos(i, j)
        causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        dots = dots.masked_fill(causal_mask, max_neg_value(dots))
        attn = self.dropout(self.attn_fn(dots))
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        out = out.transpose(1, 2).flatten(2)
        return self.to_out(out)


class Residual(nn.Module):
    def __init__(self, dim, scale_residual=False):
        super().__init__()
        self.residual_scale = nn.Parameter(torch.ones(dim)) if scale_residual else None

    def forward(self, x, residual):
        if exists(self.residual_scale):
            residual = residual * self.residual_scale
        return x + residual


@dataclass
class DecoderConfig:
    num_tokens: int = 256
    max_seq_len: int = 64
    dim: int = 32
    depth: int = 2
    heads: int = 4
    dim_head: int = 16
    num_memory_tokens: int = 2
    dropout: float = 0.0


class Decoder(nn.Module):
    def __init__(self, dim, depth, heads, dim_head, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList([])
        self.layer_types = ("a", "f") * depth
        for layer_type in self.layer_types:
            if layer_type == "a":
                layer = Attention(dim, heads, dim_head, dropout)
            else:
                layer = FeedForward(dim, dropout=dropout)
            self.layers.append(
                nn.ModuleList([ScaleNorm(dim), layer, Residual(dim, scale_residual=True)])
            )
        self.final_norm = ScaleNorm(dim)

    def forward(self, x):
        for norm, block, residual_fn in self.layers:
            residual = x
            x = norm(x)
            out = block(x)
            x = residual_fn(out, residual)
        return self.final_norm(x)


class TransformerWrapper(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config.dim
        self.token_emb = nn.Embedding(config.num_tokens, dim)
        self.emb_dropout = nn.Dropout(config.dropout)
        self.num_memory_tokens = config.num_memory_tokens
        self.memory_tokens = nn.Parameter(torch.randn(config.num_memory_tokens, dim) * 0.02)
        self.attn_layers = Decoder(dim, config.depth, config.heads, config.dim_head, config.dropout)
        self.to_logits = nn.Linear(dim, config.num_tokens, bias=False)
        nn.init.kaiming_normal_(self.token_emb.weight)

    def forward(self, x):
        b, num_mem = x.shape[0], self.num_memory_tokens
        x = self.emb_dropout(self.token_emb(x))
        mem = self.memory_tokens[None].expand(b, -1, -1)
        x = torch.cat((mem, x), dim=1)
        x = self.attn_layers(x)
        mem, x = x[:, :num_mem], x[:, num_mem:]
        return self.to_logits(x)


def train_loss(model, batch):
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.transpose(1, 2), batch["targets"])


# weft

Config = DecoderConfig
blocks = TransformerWrapper


class Embed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.token_emb, self.emb_dropout, self.memory_tokens = (
            net.token_emb,
            net.emb_dropout,
            net.memory_tokens,
        )

    def forward(self, x):
        mem = self.memory_tokens[None].expand(x.shape[0], -1, -1)
        return torch.cat((mem, self.emb_dropout(self.token_emb(x))), dim=1)


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm, self.block, self.residual_fn = layer

    def forward(self, x):
        return self.residual_fn(self.block(self.norm(x)), x)


class Head(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.num_memory_tokens = net.num_memory_tokens
        self.final_norm, self.to_logits = net.attn_layers.final_norm, net.to_logits

    def forward(self, x):
        return self.to_logits(self.final_norm(x)[:, self.num_memory_tokens :])


def blocks_of(net):
    layers = {f"layer{i}": Layer(layer) for i, layer in enumerate(net.attn_layers.layers)}
    return {"embed": Embed(net), **layers, "head": Head(net)}


def AXES(c):
    gated = Stacked(("ffn", 4 * c.dim), ("ffn", 4 * c.dim))
    return {
        "embed.memory_tokens": (None, None),
        "embed.token_emb.weight": ("vocab", None),
        "layer*.norm.g": (None,),
        "layer*.to_[qkv].weight": ("heads", None),
        "layer*.slopes": ("heads", None, None),
        "layer*.to_out.weight": (None, "heads"),
        "layer*.residual_scale": (None,),
        "layer*.ff.0.proj.weight": (gated, None),
        "layer*.ff.0.proj.bias": (gated,),
        "layer*.ff.2.weight": (None, "ffn"),
        "layer*.ff.2.bias": (None,),
        "head.final_norm.g": (None,),
        "head.to_logits.weight": ("vocab", None),
    }
