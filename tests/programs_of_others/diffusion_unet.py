"""A diffusion U-Net in lucidrains' way: time embeddings, linear attention, standardised weights, a stack of skips."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import einsum, nn

from weft import InputSpec  # weft


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, *args, **kwargs):
        return self.fn(x, *args, **kwargs) + x


def Upsample(dim, dim_out):
    return nn.Sequential(
        nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim, dim_out, 3, padding=1)
    )


class SpaceToDepth(nn.Module):
    def forward(self, x):
        return F.pixel_unshuffle(x, 2)


def Downsample(dim, dim_out):
    return nn.Sequential(SpaceToDepth(), nn.Conv2d(dim * 4, dim_out, 1))


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        device = time.device
        half_dim = self.dim // 2
        embeddings = math.log(10000) / (half_dim - 1)
        embeddings = torch.exp(torch.arange(half_dim, device=device) * -embeddings)
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1).to(time.dtype)  # weft


class WeightStandardizedConv2d(nn.Conv2d):
    def forward(self, x):
        eps = 1e-5 if x.dtype == torch.float32 else 1e-3
        weight = self.weight
        mean = weight.mean((1, 2, 3), keepdim=True)
        var = weight.var((1, 2, 3), unbiased=False, keepdim=True)
        normalized_weight = (weight - mean) * (var + eps).rsqrt()
        return F.conv2d(
            x, normalized_weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Block(nn.Module):
    def __init__(self, dim, dim_out, groups=8):
        super().__init__()
        self.proj = WeightStandardizedConv2d(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(groups, dim_out)
        self.act = nn.SiLU()

    def forward(self, x, scale_shift=None):
        x = self.proj(x)
        x = self.norm(x)
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return self.act(x)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, *, time_emb_dim=None, groups=8):
        super().__init__()
        self.mlp = (
            nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
            if time_emb_dim is not None
            else None
        )
        self.block1 = Block(dim, dim_out, groups=groups)
        self.block2 = Block(dim_out, dim_out, groups=groups)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb=None):
        scale_shift = None
        if self.mlp is not None and time_emb is not None:
            time_emb = self.mlp(time_emb)
            time_emb = time_emb[:, :, None, None]
            scale_shift = time_emb.chunk(2, dim=1)
        h = self.block1(x, scale_shift=scale_shift)
        h = self.block2(h)
        return h + self.res_conv(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=8):
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        hidden_dim = dim_head * heads
        self.to_qkv = nn.Conv2d(dim, hidden_dim * 3, 1, bias=False)
        self.to_out = nn.Conv2d(hidden_dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).chunk(3, dim=1)
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in qkv)
        q = q * self.scale
        sim = einsum("b h d i, b h d j -> b h i j", q, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h d j -> b h i d", attn, v)
        out = out.transpose(2, 3).reshape(b, -1, h, w)
        return self.to_out(out)


class LinearAttention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=8):
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        hidden_dim = dim_head * heads
        self.to_qkv = nn.Conv2d(dim, hidden_dim * 3, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(hidden_dim, dim, 1), nn.GroupNorm(1, dim))

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).chunk(3, dim=1)
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in qkv)
        q = q.softmax(dim=-2)
        k = k.softmax(dim=-1)
        q = q * self.scale
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        out = out.reshape(b, -1, h, w)
        return self.to_out(out)


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.GroupNorm(1, dim)

    def forward(self, x):
        return self.fn(self.norm(x))


@dataclass
class UnetConfig:
    dim: int = 8
    dim_mults: tuple[int, ...] = (1, 2)
    channels: int = 3
    size: int = 8
    timesteps: int = 100
    groups: int = 4


class Unet(nn.Module):
    def __init__(self, c):
        super().__init__()
        dim, self.channels = c.dim, c.channels
        self.init_conv = nn.Conv2d(c.channels, dim, 1, padding=0)
        dims = [dim, *(dim * m for m in c.dim_mults)]
        in_out = list(zip(dims[:-1], dims[1:], strict=True))
        block_klass = partial(ResnetBlock, groups=c.groups)
        time_dim = dim * 4
        self.time_mlp = nn.Sequential(
            SinusoidalPositionEmbeddings(dim),
            nn.Linear(dim, time_dim),
            nn.GELU(),
            nn.Linear(time_dim, time_dim),
        )
        self.downs = nn.ModuleList([])
        self.ups = nn.ModuleList([])
        num_resolutions = len(in_out)
        for ind, (dim_in, dim_out) in enumerate(in_out):
            is_last = ind >= (num_resolutions - 1)
            self.downs.append(
                nn.ModuleList(
                    [
                        block_klass(dim_in, dim_in, time_emb_dim=time_dim),
                        block_klass(dim_in, dim_in, time_emb_dim=time_dim),
                        Residual(PreNorm(dim_in, LinearAttention(dim_in))),
                        nn.Conv2d(dim_in, dim_out, 3, padding=1)
                        if is_last
                        else Downsample(dim_in, dim_out),
                    ]
                )
            )
        mid_dim = dims[-1]
        self.mid_block1 = block_klass(mid_dim, mid_dim, time_emb_dim=time_dim)
        self.mid_attn = Residual(PreNorm(mid_dim, Attention(mid_dim)))
        self.mid_block2 = block_klass(mid_dim, mid_dim, time_emb_dim=time_dim)
        for ind, (dim_in, dim_out) in enumerate(reversed(in_out)):
            is_last = ind == (len(in_out) - 1)
            self.ups.append(
                nn.ModuleList(
                    [
                        block_klass(dim_out + dim_in, dim_out, time_emb_dim=time_dim),
                        block_klass(dim_out + dim_in, dim_out, time_emb_dim=time_dim),
                        Residual(PreNorm(dim_out, LinearAttention(dim_out))),
                        nn.Conv2d(dim_out, dim_in, 3, padding=1)
                        if is_last
                        else Upsample(dim_out, dim_in),
                    ]
                )
            )
        self.final_res_block = block_klass(dim * 2, dim, time_emb_dim=time_dim)
        self.final_conv = nn.Conv2d(dim, c.channels, 1)
        betas = torch.linspace(0.0001, 0.02, c.timesteps)
        alphas_cumprod = torch.cumprod(1.0 - betas, axis=0)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))

    def q_sample(self, x_start, t, noise):
        shape = (len(t), 1, 1, 1)
        a = self.sqrt_alphas_cumprod.gather(-1, t).reshape(shape)
        b = self.sqrt_one_minus_alphas_cumprod.gather(-1, t).reshape(shape)
        return a * x_start + b * noise

    def forward(self, x, time):
        x = self.init_conv(x)
        r = x.clone()
        t = self.time_mlp(time.to(x.dtype))  # weft
        h = []
        for block1, block2, attn, downsample in self.downs:
            x = block1(x, t)
            h.append(x)
            x = block2(x, t)
            x = attn(x)
            h.append(x)
            x = downsample(x)
        x = self.mid_block1(x, t)
        x = self.mid_attn(x)
        x = self.mid_block2(x, t)
        for block1, block2, attn, upsample in self.ups:
            x = torch.cat((x, h.pop()), dim=1)
            x = block1(x, t)
            x = torch.cat((x, h.pop()), dim=1)
            x = block2(x, t)
            x = attn(x)
            x = upsample(x)
        x = torch.cat((x, r), dim=1)
        x = self.final_res_block(x, t)
        return self.final_conv(x)


def train_loss(model, batch):
    x_noisy = model.q_sample(batch["image"], batch["t"], batch["noise"])
    predicted_noise = model(x_noisy, batch["t"])
    return F.smooth_l1_loss(batch["noise"], predicted_noise)


# weft

Config = UnetConfig
blocks = Unet


def INPUTS(c):
    image = InputSpec((c.channels, c.size, c.size))
    return {"image": image, "noise": image, "t": InputSpec((), "int64", below=c.timesteps)}


class Init(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.init_conv, self.time_mlp = unet.init_conv, unet.time_mlp
        self.register_buffer("sqrt_alphas_cumprod", unet.sqrt_alphas_cumprod)
        self.register_buffer("sqrt_one_minus_alphas_cumprod", unet.sqrt_one_minus_alphas_cumprod)

    def forward(self, image, batch):
        noise, t = batch.fields["noise"], batch.fields["t"]
        dtype = self.init_conv.weight.dtype
        x = self.init_conv(Unet.q_sample(self, image.to(dtype), t, noise.to(dtype)))
        return x, self.time_mlp(t.to(dtype)), x


class Down(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.block1, self.block2, self.attn, self.downsample = modules

    def forward(self, state):
        x, t, *h = state
        x = self.block1(x, t)
        skip = x
        x = self.attn(self.block2(x, t))
        return (self.downsample(x), t, *h, skip, x)


class Middle(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.block1, self.attn, self.block2 = unet.mid_block1, unet.mid_attn, unet.mid_block2

    def forward(self, state):
        x, t, *h = state
        return (self.block2(self.attn(self.block1(x, t)), t), t, *h)


class Up(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.block1, self.block2, self.attn, self.upsample = modules

    def forward(self, state):
        x, t, *h = state
        x = self.block1(torch.cat((x, h.pop()), dim=1), t)
        x = self.block2(torch.cat((x, h.pop()), dim=1), t)
        return (self.upsample(self.attn(x)), t, *h)


class Loss(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.final_res_block, self.final_conv = unet.final_res_block, unet.final_conv

    def forward(self, state, batch):
        x, t, r = state
        x = self.final_conv(self.final_res_block(torch.cat((x, r), dim=1), t))
        noise = batch.fields["noise"].to(x.dtype)
        return F.smooth_l1_loss(noise, x, reduction="none").mean((1, 2, 3)).sum()


def blocks_of(unet):
    downs = {f"down{i}": Down(modules) for i, modules in enumerate(unet.downs)}
    ups = {f"up{i}": Up(modules) for i, modules in enumerate(unet.ups)}
    return {"init": Init(unet), **downs, "middle": Middle(unet), **ups, "loss": Loss(unet)}


AXES = {
    "*.mlp.1.weight": (None, None),
    "init.time_mlp.?.weight": (None, None),
    "*conv.weight": (None,) * 4,
    "*.proj.weight": (None,) * 4,
    "*.to_qkv.weight": (None,) * 4,
    "*.attn.fn.fn.to_out.0.weight": (None,) * 4,
    "middle.attn.fn.fn.to_out.weight": (None,) * 4,
    "*.attn.fn.fn.to_out.1.weight": (None,),
    "down?.downsample.1.weight": (None,) * 4,
    "down?.downsample.weight": (None,) * 4,
    "up?.upsample.1.weight": (None,) * 4,
    "up?.upsample.weight": (None,) * 4,
    "*norm.weight": (None,),
    "*.bias": (None,),
}
