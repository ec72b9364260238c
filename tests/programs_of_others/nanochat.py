"""nanochat: norms without weights, rotary tables as buffers, norms of q and k, values from embeddings."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from weft import Attend, Batch  # weft


@dataclass
class GPTConfig:
    sequence_len: int = 64
    vocab_size: int = 260
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 32


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def has_ve(layer_idx, n_layer):
    return layer_idx % 2 == (n_layer - 1) % 2


def apply_rotary_emb(x, cos, sin):
    assert x.ndim == 4
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    y1 = x1 * cos + x2 * sin
    y2 = x1 * (-sin) + x2 * cos
    return torch.cat([y1, y2], 3)


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.n_embd = config.n_embd
        self.head_dim = self.n_embd // self.n_head
        assert self.n_kv_head <= self.n_head and self.n_head % self.n_kv_head == 0
        self.c_q = nn.Linear(self.n_embd, self.n_head * self.head_dim, bias=False)
        self.c_k = nn.Linear(self.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_v = nn.Linear(self.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_proj = nn.Linear(self.n_embd, self.n_embd, bias=False)
        self.ve_gate_channels = 12
        self.attend = Attend()  # weft
        has_gate = has_ve(layer_idx, config.n_layer)
        self.ve_gate = (
            nn.Linear(self.ve_gate_channels, self.n_kv_head, bias=False) if has_gate else None
        )

    def forward(self, x, ve, cos_sin, batch):  # weft
        B, T, C = x.size()
        q = self.c_q(x).unflatten(2, (-1, self.head_dim))  # weft
        k = self.c_k(x).unflatten(2, (-1, self.head_dim))  # weft
        v = self.c_v(x).unflatten(2, (-1, self.head_dim))  # weft
        if ve is not None:
            ve = ve.unflatten(2, (-1, self.head_dim))  # weft
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate_channels]))
            v = v + gate.unsqueeze(-1) * ve
        cos, sin = cos_sin
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        q, k = norm(q), norm(k)
        y = self.attend(q, k, v, batch)  # weft
        y = y.flatten(2)  # weft
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        x = self.c_fc(x)
        x = F.relu(x).square()
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos_sin, batch):  # weft
        x = x + self.attn(norm(x), ve, cos_sin, batch)  # weft
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "h": nn.ModuleList(
                    [Block(config, layer_idx) for layer_idx in range(config.n_layer)]
                ),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        head_dim = config.n_embd // config.n_head
        kv_dim = config.n_kv_head * head_dim
        self.value_embeds = nn.ModuleDict(
            {
                str(i): nn.Embedding(config.vocab_size, kv_dim)
                for i in range(config.n_layer)
                if has_ve(i, config.n_layer)
            }
        )
        self.rotary_seq_len = config.sequence_len * 10
        cos, sin = self._precompute_rotary_embeddings(self.rotary_seq_len, head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        torch.nn.init.normal_(self.transformer.wte.weight, mean=0.0, std=0.8)
        torch.nn.init.normal_(self.lm_head.weight, mean=0.0, std=0.1)
        s = 3**0.5 * self.config.n_embd**-0.5
        for block in self.transformer.h:
            torch.nn.init.uniform_(block.attn.c_q.weight, -s, s)
            torch.nn.init.uniform_(block.attn.c_k.weight, -s, s)
            torch.nn.init.uniform_(block.attn.c_v.weight, -s, s)
            torch.nn.init.uniform_(block.attn.c_proj.weight, -s, s)
            torch.nn.init.uniform_(block.mlp.c_fc.weight, -s, s)
            torch.nn.init.uniform_(block.mlp.c_proj.weight, -s, s)
            if block.attn.ve_gate is not None:
                torch.nn.init.zeros_(block.attn.ve_gate.weight)
        for ve in self.value_embeds.values():
            torch.nn.init.uniform_(ve.weight, -s, s)
        self.resid_lambdas.fill_(1.0)
        self.x0_lambdas.fill_(0.1)

    def _precompute_rotary_embeddings(self, seq_len, head_dim, base=10000):
        channel_range = torch.arange(0, head_dim, 2, dtype=torch.float32)
        inv_freq = 1.0 / (base ** (channel_range / head_dim))
        t = torch.arange(seq_len, dtype=torch.float32)
        freqs = torch.outer(t, inv_freq)
        cos, sin = freqs.cos(), freqs.sin()
        return cos[None, :, None, :], sin[None, :, None, :]

    def forward(self, idx, targets=None):
        B, T = idx.size()
        cos_sin = self.cos[:, :T], self.sin[:, :T]
        x = norm(self.transformer.wte(idx))
        x0 = x
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve, cos_sin, Batch(idx, targets, torch.arange(T).expand(B, T)))  # weft
        x = norm(x)
        softcap = 15
        logits = self.lm_head(x)
        logits = softcap * torch.tanh(logits / softcap)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def train_loss(model, batch):
    return model(batch["inputs"], batch["targets"])


# weft

Config = GPTConfig
blocks = GPT


class Embed(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.wte = gpt.transformer.wte

    def forward(self, idx):
        x = norm(self.wte(idx))
        return x, x


class Layer(nn.Module):
    def __init__(self, gpt, i):
        super().__init__()
        self.i, self.block = i, gpt.transformer.h[i]
        self.resid_lambdas, self.x0_lambdas = gpt.resid_lambdas, gpt.x0_lambdas
        self.ve = gpt.value_embeds[str(i)] if str(i) in gpt.value_embeds else None
        self.register_buffer("cos", gpt.cos, persistent=False)
        self.register_buffer("sin", gpt.sin, persistent=False)

    def forward(self, both, batch):
        x, x0 = both
        cos_sin = self.cos[0, batch.positions], self.sin[0, batch.positions]
        x = self.resid_lambdas[self.i] * x + self.x0_lambdas[self.i] * x0
        ve = self.ve(batch.inputs) if self.ve is not None else None
        return self.block(x, ve, cos_sin, batch), x0


class Head(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.lm_head = gpt.lm_head

    def forward(self, both):
        return 15 * torch.tanh(self.lm_head(norm(both[0])) / 15)


def blocks_of(gpt):
    layers = {f"h{i}": Layer(gpt, i) for i in range(gpt.config.n_layer)}
    return {"embed": Embed(gpt), **layers, "head": Head(gpt)}


AXES = {
    "embed.wte.weight": ("vocab", None),
    "h*.*_lambdas": (None,),
    "h*.c_q.weight": ("heads", None),
    "h*.c_[kv].weight": ("kv_heads", None),
    "h*.ve_gate.weight": ("kv_heads", None),
    "h*.ve.weight": (None, "kv_heads"),
    "h*.attn.c_proj.weight": (None, "heads"),
    "h*.c_fc.weight": ("ffn", None),
    "h*.mlp.c_proj.weight": (None, "ffn"),
    "head.lm_head.weight": ("vocab", None),
}
