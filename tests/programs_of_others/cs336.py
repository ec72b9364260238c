"""The transformer of the CS336 assignment: modules from parameters, einsums, RoPE, SwiGLU, a loss by logsumexp."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import einsum


class Linear(nn.Linear):  # weft: a module with a parameter and an einsum
    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out, bias=False)  # weft
        std = math.sqrt(2 / (d_in + d_out))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)  # weft


class Embedding(nn.Embedding):  # weft: a module with a parameter and an index
    def __init__(self, vocab_size, d_model):
        super().__init__(vocab_size, d_model)  # weft
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3, b=3)  # weft


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * rms
        return self.weight * x


class RotaryEmbedding(nn.Module):
    def __init__(self, context_length, dim, theta=10000.0):
        super().__init__()
        self.register_buffer(
            "_freq_cis_cache",
            RotaryEmbedding._init_cache(context_length, dim, theta),
            persistent=False,
        )

    @staticmethod
    def _init_cache(context_length, dim, theta):
        d = torch.arange(0, dim, 2) / dim
        freqs = theta**-d
        t = torch.arange(context_length)
        freqs = einsum("t,f->tf", t, freqs)
        cos, sin = torch.cos(freqs), torch.sin(freqs)
        return torch.stack((cos, sin))

    def forward(self, x, pos_ids):
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self._freq_cis_cache[:, pos_ids].to(x.dtype)[:, :, :, None]
        x1_rot = cos * x1 - sin * x2
        x2_rot = sin * x1 + cos * x2
        return torch.stack((x1_rot, x2_rot), dim=-1).flatten(-2)


class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x):
    return x * torch.sigmoid(x)


def softmax(x, dim=-1):
    rescaled = x - torch.max(x, dim=dim, keepdim=True)[0]
    exponentiated = torch.exp(rescaled)
    return exponentiated / torch.sum(exponentiated, dim=dim, keepdim=True)


def cross_entropy(inputs, targets):
    negative_log = -inputs + torch.logsumexp(inputs, dim=-1, keepdim=True)
    return torch.gather(negative_log, -1, targets.unsqueeze(-1)).mean()


class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, positional_encoder):
        super().__init__()
        assert d_model % num_heads == 0
        self.d_k = d_model // num_heads
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)
        self.positional_encoder = positional_encoder

    def forward(self, x):
        *b, sequence_length, d_model = x.size()
        heads = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        Q, K, V = (t.unflatten(-1, (-1, self.d_k)) for t in heads)
        token_positions = torch.arange(sequence_length, device=x.device).expand(*b, -1)
        Q = self.positional_encoder(Q, token_positions).transpose(1, 2)
        K = self.positional_encoder(K, token_positions).transpose(1, 2)
        seq = torch.arange(sequence_length, device=x.device)
        causal_mask = seq[:, None] >= seq[None, :]
        attention_scores = einsum("bhqd,bhkd->bhqk", Q, K) / math.sqrt(K.shape[-1])
        attention_scores = torch.where(causal_mask, attention_scores, float("-inf"))
        attn_output = einsum("bhqk,bkhd->bqhd", softmax(attention_scores, dim=-1), V)
        return self.output_proj(attn_output.flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, positional_encoder):
        super().__init__()
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, positional_encoder)
        self.ffn = SwiGLU(d_model, d_ff)
        self.ln1 = RMSNorm(d_model)
        self.ln2 = RMSNorm(d_model)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


@dataclass
class LMConfig:
    vocab_size: int = 256
    context_length: int = 64
    d_model: int = 32
    num_layers: int = 2
    num_heads: int = 4
    d_ff: int = 80
    rope_theta: float = 10000.0


class BasicsTransformerLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.token_embeddings = Embedding(c.vocab_size, c.d_model)
        d_head = c.d_model // c.num_heads
        self.positional_encoder = RotaryEmbedding(c.context_length, d_head, c.rope_theta)
        self.layers = nn.ModuleList(
            [
                TransformerBlock(c.d_model, c.num_heads, c.d_ff, self.positional_encoder)
                for _ in range(c.num_layers)
            ]
        )
        self.ln_final = RMSNorm(c.d_model)
        self.lm_head = Linear(c.d_model, c.vocab_size)

    def forward(self, x):
        x = self.token_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        x = self.ln_final(x)
        return self.lm_head(x)


def train_loss(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["targets"])


# weft

Config = LMConfig
blocks = BasicsTransformerLM


def blocks_of(lm):
    layers = {f"layer{i}": layer for i, layer in enumerate(lm.layers)}
    return {"embed": lm.token_embeddings, **layers, "head": nn.Sequential(lm.ln_final, lm.lm_head)}


AXES = {
    "embed.weight": ("vocab", None),
    "layer*.[qkv]_proj.weight": ("heads", None),
    "layer*.output_proj.weight": (None, "heads"),
    "layer*.w[13].weight": ("ffn", None),
    "layer*.w2.weight": (None, "ffn"),
    "layer*.ln?.weight": (None,),
    "head.0.weight": (None,),
    "head.1.weight": ("vocab", None),
}
