"""nanoGPT: tied weights by assignment, weights initialised by their names, positions from an arange."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from weft import Attend, Batch, Stacked  # weft


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.attend = Attend(dropout=config.dropout)  # weft

    def forward(self, x, batch):  # weft
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # weft
        k = k.unflatten(2, (-1, C // self.n_head))  # weft
        q = q.unflatten(2, (-1, C // self.n_head))  # weft
        v = v.unflatten(2, (-1, C // self.n_head))  # weft
        y = self.attend(q, k, v, batch)  # weft
        y = y.flatten(2)  # weft
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, batch):  # weft
        x = x + self.attn(self.ln_1(x), batch)  # weft
        return x + self.mlp(self.ln_2(x))


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= self.config.block_size
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        batch = Batch(idx, targets, pos.expand(b, t))  # weft
        for block in self.transformer.h:
            x = block(x, batch)  # weft
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def train_loss(model, batch):
    logits, loss = model(batch["inputs"], batch["targets"])
    return loss


# weft

Config = GPTConfig
blocks = GPT


class Embed(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.wte, self.wpe, self.drop = (gpt.transformer[name] for name in ("wte", "wpe", "drop"))

    def forward(self, idx, batch):
        return self.drop(self.wte(idx) + self.wpe(batch.positions))


def blocks_of(gpt):
    layers = {f"h{i}": block for i, block in enumerate(gpt.transformer.h)}
    head = nn.Sequential(gpt.transformer.ln_f, gpt.lm_head)
    return {"embed": Embed(gpt), **layers, "head": head}


def AXES(config):
    qkv = Stacked(*[("heads", config.n_head)] * 3)
    axes = {
        "embed.wte.weight": ("vocab", None),
        "embed.wpe.weight": (None, None),
        "h*.ln_?.weight": (None,),
        "h*.attn.c_attn.weight": (qkv, None),
        "h*.attn.c_proj.weight": (None, "heads"),
        "h*.mlp.c_fc.weight": ("ffn", None),
        "h*.mlp.c_proj.weight": (None, "ffn"),
        "head.0.weight": (None,),
    }
    biases = {
        "h*.ln_?.bias": (None,),
        "h*.attn.c_attn.bias": (qkv,),
        "h*.mlp.c_fc.bias": ("ffn",),
        "h*.c_proj.bias": (None,),
        "head.0.bias": (None,),
    }
    return {**axes, **biases} if config.bias else axes
