"""mamba-minimal: a selective scan as a loop over positions, einsums, a depthwise convolution, A from an arange."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import einsum

from weft import RegionInput, Stacked  # weft


def rearrange(x, pattern):
    return {"b l d -> b d l": x.transpose(1, 2), "b d l -> b l d": x.transpose(1, 2)}[pattern]


def repeat(x, d):
    return x[None].expand(d, -1).clone()


@dataclass
class ModelArgs:
    d_model: int = 24
    n_layer: int = 2
    vocab_size: int = 250
    d_state: int = 4
    expand: int = 2
    dt_rank: int = 0
    d_conv: int = 4
    pad_vocab_size_multiple: int = 8
    conv_bias: bool = True
    bias: bool = False

    def __post_init__(self):
        self.d_inner = int(self.expand * self.d_model)
        if self.dt_rank == 0:
            self.dt_rank = math.ceil(self.d_model / 16)
        if self.vocab_size % self.pad_vocab_size_multiple != 0:
            self.vocab_size += (
                self.pad_vocab_size_multiple - self.vocab_size % self.pad_vocab_size_multiple
            )


class Mamba(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.layers = nn.ModuleList([ResidualBlock(args) for _ in range(args.n_layer)])
        self.norm_f = RMSNorm(args.d_model)
        self.lm_head = nn.Linear(args.d_model, args.vocab_size, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm_f(x)
        return self.lm_head(x)


class ResidualBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.mixer = MambaBlock(args)
        self.norm = RMSNorm(args.d_model)

    def forward(self, x):
        return self.mixer(self.norm(x)) + x


class MambaBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.in_proj = nn.Linear(args.d_model, args.d_inner * 2, bias=args.bias)
        self.conv1d = nn.Conv1d(
            in_channels=args.d_inner,
            out_channels=args.d_inner,
            bias=args.conv_bias,
            kernel_size=args.d_conv,
            groups=args.d_inner,
            padding=args.d_conv - 1,
        )
        self.x_proj = nn.Linear(args.d_inner, args.dt_rank + args.d_state * 2, bias=False)
        self.dt_proj = nn.Linear(args.dt_rank, args.d_inner, bias=True)
        A = repeat(torch.arange(1, args.d_state + 1), d=args.d_inner)
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(args.d_inner))
        self.out_proj = nn.Linear(args.d_inner, args.d_model, bias=args.bias)
        self.enter = RegionInput()  # weft: B and C meet channels of one rank

    def forward(self, x):
        (b, l, d) = x.shape
        x_and_res = self.in_proj(x)
        (x, res) = x_and_res.chunk(2, dim=-1)  # weft
        x = rearrange(x, "b l d -> b d l")
        conv = self.conv1d  # weft
        x = F.conv1d(x, conv.weight, conv.bias, padding=conv.padding, groups=x.shape[1])[
            :, :, :l
        ]  # weft
        x = rearrange(x, "b d l -> b l d")
        x = F.silu(x)
        y = self.ssm(x)
        y = y * F.silu(res)
        return self.out_proj(y)

    def ssm(self, x):
        (d_in, n) = self.A_log.shape
        A = -torch.exp(self.A_log)  # weft: .float() here and below
        D = self.D  # weft
        x_dbl = self.enter(self.x_proj(x))  # weft
        (delta, B, C) = x_dbl.split(split_size=[self.args.dt_rank, n, n], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        return self.selective_scan(x, delta, A, B, C, D)

    def selective_scan(self, u, delta, A, B, C, D):
        (b, l, d_in) = u.shape
        deltaA = torch.exp(einsum("bld,dn->bldn", delta, A.to(delta.dtype)))
        deltaB_u = einsum("bld,bln,bld->bldn", delta, B, u)
        x = torch.zeros_like(deltaA[:, 0])  # weft
        ys = []
        for i in range(l):
            x = deltaA[:, i] * x + deltaB_u[:, i]
            y = einsum("bdn,bn->bd", x, C[:, i, :])
            ys.append(y)
        y = torch.stack(ys, dim=1)
        return y + u * D


class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def train_loss(model, batch):
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


# weft

Config = ModelArgs
blocks = Mamba


def blocks_of(mamba):
    layers = {f"layer{i}": layer for i, layer in enumerate(mamba.layers)}
    return {
        "embedding": mamba.embedding,
        **layers,
        "head": nn.Sequential(mamba.norm_f, mamba.lm_head),
    }


def AXES(args):
    d_inner = Stacked(("ffn", args.d_inner), ("ffn", args.d_inner))
    axes = {
        "embedding.weight": ("vocab", None),
        "layer*.A_log": ("ffn", None),
        "layer*.D": ("ffn",),
        "layer*.in_proj.weight": (d_inner, None),
        "layer*.conv1d.weight": ("ffn", None, None),
        "layer*.conv1d.bias": ("ffn",),
        "layer*.x_proj.weight": (None, "ffn"),
        "layer*.dt_proj.weight": ("ffn", None),
        "layer*.dt_proj.bias": ("ffn",),
        "layer*.out_proj.weight": (None, "ffn"),
        "*.norm.weight": (None,),
        "head.0.weight": (None,),
    }
    biases = {"layer*.in_proj.bias": (d_inner,), "layer*.out_proj.bias": (None,)}
    return {**axes, **biases} if args.bias else axes
