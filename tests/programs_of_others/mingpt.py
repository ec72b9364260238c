"""minGPT: a causal mask as a buffer, masked_fill, a ModuleDict as MLP that a lambda calls."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from weft import Stacked  # weft


class NewGELU(nn.Module):
    def forward(self, x):
        return (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        )


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        size = config.block_size
        self.register_buffer("bias", torch.tril(torch.ones(size, size)).view(1, 1, size, size))
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # weft
        k = k.view(B, T, -1, C // self.n_head).transpose(1, 2)  # weft
        q = q.view(B, T, -1, C // self.n_head).transpose(1, 2)  # weft
        v = v.view(B, T, -1, C // self.n_head).transpose(1, 2)  # weft
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, -1)  # weft
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=nn.Linear(config.n_embd, 4 * config.n_embd),
                c_proj=nn.Linear(4 * config.n_embd, config.n_embd),
                act=NewGELU(),
                dropout=nn.Dropout(config.resid_pdrop),
            )
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlpf(self.ln_2(x))
        return x


@dataclass
class GPTConfig:
    n_layer: int = 3
    n_head: int = 6
    n_embd: int = 48
    vocab_size: int = 256
    block_size: int = 48
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attn_pdrop: float = 0.0


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.embd_pdrop),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
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
        elif isinstance(module, nn.LayerNorm):
            torch.nn.init.zeros_(module.bias)
            torch.nn.init.ones_(module.weight)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
            )
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
    return {
        "embed.wte.weight": ("vocab", None),
        "embed.wpe.weight": (None, None),
        "h*.ln_?.*": (None,),
        "h*.attn.c_attn.weight": (qkv, None),
        "h*.attn.c_attn.bias": (qkv,),
        "h*.attn.c_proj.weight": (None, "heads"),
        "h*.mlp.c_fc.weight": ("ffn", None),
        "h*.mlp.c_fc.bias": ("ffn",),
        "h*.mlp.c_proj.weight": (None, "ffn"),
        "h*.c_proj.bias": (None,),
        "head.0.*": (None,),
        "head.1.weight": ("vocab", None),
    }
