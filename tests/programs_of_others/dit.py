"""DiT: noise and time as arrays, adaLN-Zero, fixed sine positions as a parameter without gradient."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from weft import InputSpec, Stacked  # weft


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, frequency_embedding_size=32):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size, bias=True),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size, bias=True),
        )
        self.frequency_embedding_size = frequency_embedding_size

    @staticmethod
    def timestep_embedding(t, dim, max_period=10000):
        half = dim // 2
        freqs = torch.exp(
            -math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half
        ).to(device=t.device)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, t):
        t_freq = self.timestep_embedding(t, self.frequency_embedding_size)
        return self.mlp(t_freq.to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    def __init__(self, num_classes, hidden_size):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)
        self.num_classes = num_classes

    def token_drop(self, labels, force_drop_ids):
        return torch.where(force_drop_ids == 1, self.num_classes, labels)

    def forward(self, labels, force_drop_ids):
        return self.embedding_table(self.token_drop(labels, force_drop_ids))


class PatchEmbed(nn.Module):
    def __init__(self, input_size, patch_size, in_channels, hidden_size):
        super().__init__()
        self.num_patches = (input_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, -1, self.head_dim)  # weft
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, -1)  # weft
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features, act_layer):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class DiTBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads=num_heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        approx_gelu = lambda: nn.GELU(approximate="tanh")
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=approx_gelu)
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size, bias=True)
        )

    def forward(self, x, c):
        mod = self.adaLN_modulation(c).chunk(6, dim=1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = mod
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


class FinalLayer(nn.Module):
    def __init__(self, hidden_size, patch_size, out_channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels, bias=True)
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size, bias=True)
        )

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = modulate(self.norm_final(x), shift, scale)
        return self.linear(x)


@dataclass
class DiTConfig:
    input_size: int = 8
    patch_size: int = 2
    in_channels: int = 4
    hidden_size: int = 32
    depth: int = 2
    num_heads: int = 4
    num_classes: int = 10
    num_steps: int = 1000


class DiT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.in_channels, self.out_channels = c.in_channels, c.in_channels
        self.patch_size = c.patch_size
        self.x_embedder = PatchEmbed(c.input_size, c.patch_size, c.in_channels, c.hidden_size)
        self.t_embedder = TimestepEmbedder(c.hidden_size)
        self.y_embedder = LabelEmbedder(c.num_classes, c.hidden_size)
        num_patches = self.x_embedder.num_patches
        self.pos_embed = nn.Parameter(
            torch.zeros(1, num_patches, c.hidden_size), requires_grad=False
        )
        self.blocks = nn.ModuleList([DiTBlock(c.hidden_size, c.num_heads) for _ in range(c.depth)])
        self.final_layer = FinalLayer(c.hidden_size, c.patch_size, self.out_channels)
        betas = np.linspace(1e-4, 0.02, c.num_steps, dtype=np.float64)
        self.register_buffer("alphas_cumprod", torch.from_numpy(np.cumprod(1.0 - betas)))
        self.initialize_weights()

    def initialize_weights(self):
        def _basic_init(module):
            if isinstance(module, nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.constant_(module.bias, 0)

        self.apply(_basic_init)
        pos_embed = get_2d_sincos_pos_embed(
            self.pos_embed.shape[-1], int(self.x_embedder.num_patches**0.5)
        )
        self.pos_embed.data.copy_(torch.from_numpy(pos_embed).float().unsqueeze(0))
        w = self.x_embedder.proj.weight.data
        nn.init.xavier_uniform_(w.view([w.shape[0], -1]))
        nn.init.constant_(self.x_embedder.proj.bias, 0)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[0].weight, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[2].weight, std=0.02)
        for block in self.blocks:
            nn.init.constant_(block.adaLN_modulation[-1].weight, 0)
            nn.init.constant_(block.adaLN_modulation[-1].bias, 0)
        nn.init.constant_(self.final_layer.adaLN_modulation[-1].weight, 0)
        nn.init.constant_(self.final_layer.adaLN_modulation[-1].bias, 0)
        nn.init.constant_(self.final_layer.linear.weight, 0)
        nn.init.constant_(self.final_layer.linear.bias, 0)

    def unpatchify(self, x):
        c = self.out_channels
        p = self.patch_size
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(shape=(x.shape[0], h, w, p, p, c))
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(shape=(x.shape[0], c, h * p, h * p))

    def q_sample(self, x_start, t, noise):
        a = self.alphas_cumprod[t].to(x_start.dtype).view(-1, 1, 1, 1)
        return a.sqrt() * x_start + (1 - a).sqrt() * noise

    def forward(self, x, t, y, drop):
        x = self.x_embedder(x) + self.pos_embed
        t = self.t_embedder(t)
        y = self.y_embedder(y, drop)
        c = t + y
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        return self.unpatchify(x)


def get_2d_sincos_pos_embed(embed_dim, grid_size):
    grid_h = np.arange(grid_size, dtype=np.float32)
    grid_w = np.arange(grid_size, dtype=np.float32)
    grid = np.stack(np.meshgrid(grid_w, grid_h), axis=0)
    emb_h = get_1d_sincos_pos_embed_from_grid(embed_dim // 2, grid[0])
    emb_w = get_1d_sincos_pos_embed_from_grid(embed_dim // 2, grid[1])
    return np.concatenate([emb_h, emb_w], axis=1)


def get_1d_sincos_pos_embed_from_grid(embed_dim, pos):
    omega = np.arange(embed_dim // 2, dtype=np.float64)
    omega = 1.0 / 10000 ** (omega / (embed_dim / 2.0))
    out = np.einsum("m,d->md", pos.reshape(-1), omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=1)


def train_loss(model, batch):
    x_t = model.q_sample(batch["image"], batch["t"], batch["noise"])
    output = model(x_t, batch["t"], batch["y"], batch["drop"])
    return F.mse_loss(output, batch["noise"])


# weft

Config = DiTConfig
blocks = DiT


def INPUTS(c):
    image = InputSpec((c.in_channels, c.input_size, c.input_size))
    return {
        "image": image,
        "noise": image,
        "t": InputSpec((), "int64", below=c.num_steps),
        "y": InputSpec((), "int64", below=c.num_classes),
        "drop": InputSpec((), "int64", below=2),
    }


class Embed(nn.Module):
    def __init__(self, dit):
        super().__init__()
        self.x_embedder, self.t_embedder, self.y_embedder = (
            dit.x_embedder,
            dit.t_embedder,
            dit.y_embedder,
        )
        self.pos_embed = dit.pos_embed
        self.register_buffer("alphas_cumprod", dit.alphas_cumprod)

    def forward(self, image, batch):
        dtype = self.pos_embed.dtype
        fields = batch.fields
        x = DiT.q_sample(self, image.to(dtype), fields["t"], fields["noise"].to(dtype))
        c = self.t_embedder(fields["t"]) + self.y_embedder(fields["y"], fields["drop"])
        return self.x_embedder(x) + self.pos_embed, c


class Layer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, both):
        return self.block(*both), both[1]


class Loss(nn.Module):
    def __init__(self, dit):
        super().__init__()
        self.final_layer, self.out_channels, self.patch_size = (
            dit.final_layer,
            dit.out_channels,
            dit.patch_size,
        )

    def forward(self, both, batch):
        out = DiT.unpatchify(self, self.final_layer(*both))
        return (out - batch.fields["noise"]).square().mean((1, 2, 3)).sum()


def blocks_of(dit):
    layers = {f"block{i}": Layer(block) for i, block in enumerate(dit.blocks)}
    return {"embed": Embed(dit), **layers, "loss": Loss(dit)}


def AXES(c):
    qkv = Stacked(*[("heads", c.num_heads)] * 3)
    return {
        "embed.pos_embed": (None, None, None),
        "embed.x_embedder.proj.weight": (None, None, None, None),
        "embed.*.bias": (None,),
        "embed.t_embedder.mlp.?.weight": (None, None),
        "embed.y_embedder.embedding_table.weight": (None, None),
        "block*.attn.qkv.weight": (qkv, None),
        "block*.attn.qkv.bias": (qkv,),
        "block*.attn.proj.weight": (None, "heads"),
        "block*.attn.proj.bias": (None,),
        "block*.fc1.weight": ("ffn", None),
        "block*.fc1.bias": ("ffn",),
        "block*.fc2.weight": (None, "ffn"),
        "block*.fc2.bias": (None,),
        "*.adaLN_modulation.1.weight": (None, None),
        "*.adaLN_modulation.1.bias": (None,),
        "loss.final_layer.linear.weight": (None, None),
        "loss.final_layer.linear.bias": (None,),
    }
