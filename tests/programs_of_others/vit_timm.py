"""timm's ViT: partial norm layers, LayerScale, DropPath, register tokens, trunc_normal by names, blocks in one nn.Sequential."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from weft import DropPath, InputSpec, Stacked  # weft


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features=None, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        hidden_features = hidden_features or in_features
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x):
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))


class Attention(nn.Module):
    fused_attn: bool

    def __init__(self, dim, num_heads=8, qkv_bias=False, qk_norm=False, norm_layer=nn.LayerNorm):
        super().__init__()
        assert dim % num_heads == 0, "dim should be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, -1, self.head_dim)  # weft
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            x = attn.softmax(dim=-1) @ v
        x = x.transpose(1, 2).reshape(B, N, -1)  # weft
        return self.proj(x)


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=1e-5, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Block(nn.Module):
    def __init__(
        self,
        dim,
        num_heads,
        mlp_ratio=4.0,
        init_values=None,
        drop_path=0.0,
        norm_layer=nn.LayerNorm,
    ):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, qkv_bias=True, qk_norm=True, norm_layer=norm_layer)
        self.ls1 = LayerScale(dim, init_values, inplace=True) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x


class PatchEmbed(nn.Module):
    def __init__(self, img_size, patch_size, in_chans, embed_dim):
        super().__init__()
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


@dataclass
class VitConfig:
    img_size: int = 16
    patch_size: int = 4
    num_classes: int = 7
    embed_dim: int = 32
    depth: int = 3
    num_heads: int = 4
    init_values: float = 0.1
    reg_tokens: int = 2
    drop_path_rate: float = 0.0
    frozen_stem: bool = False


class VisionTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.num_prefix_tokens = 1 + c.reg_tokens
        self.patch_embed = PatchEmbed(c.img_size, c.patch_size, 3, c.embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.embed_dim))
        self.reg_token = (
            nn.Parameter(torch.zeros(1, c.reg_tokens, c.embed_dim)) if c.reg_tokens else None
        )
        self.pos_embed = nn.Parameter(
            torch.randn(1, self.patch_embed.num_patches, c.embed_dim) * 0.02
        )
        dpr = [x.item() for x in torch.linspace(0, c.drop_path_rate, c.depth)]
        self.blocks = nn.Sequential(
            *[
                Block(c.embed_dim, c.num_heads, 4.0, c.init_values, dpr[i], norm_layer=norm_layer)
                for i in range(c.depth)
            ]
        )
        self.norm = norm_layer(c.embed_dim)
        self.fc_norm = nn.Identity()
        self.head = nn.Linear(c.embed_dim, c.num_classes) if c.num_classes > 0 else nn.Identity()
        for name, m in self.named_modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
        nn.init.normal_(self.cls_token, std=1e-6)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=1e-6)
        if c.frozen_stem:
            self.patch_embed.requires_grad_(False)

    def _pos_embed(self, x):
        x = x + self.pos_embed
        to_cat = [self.cls_token.expand(x.shape[0], -1, -1)]
        if self.reg_token is not None:
            to_cat.append(self.reg_token.expand(x.shape[0], -1, -1))
        return torch.cat([*to_cat, x], dim=1)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = self._pos_embed(x)
        x = self.blocks(x)
        return self.norm(x)

    def forward_head(self, x):
        x = x[:, self.num_prefix_tokens :].mean(dim=1) + x[:, 0]
        x = self.fc_norm(x)
        return self.head(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def train_loss(model, batch):
    image = batch["image"].to(model.pos_embed.dtype) / 255
    return F.cross_entropy(model(image), batch["targets"], label_smoothing=0.1)


# weft

Config = VitConfig
blocks = VisionTransformer


def INPUTS(c):
    image = InputSpec((3, c.img_size, c.img_size), "uint8")
    return {"image": image, "targets": InputSpec((), "int64", below=c.num_classes)}


class Embed(nn.Module):
    def __init__(self, vit):
        super().__init__()
        self.patch_embed, self.pos_embed = vit.patch_embed, vit.pos_embed
        self.cls_token, self.reg_token = vit.cls_token, vit.reg_token

    def forward(self, x):
        return VisionTransformer._pos_embed(
            self, self.patch_embed(x.to(self.pos_embed.dtype) / 255)
        )


class Loss(nn.Module):
    def __init__(self, vit):
        super().__init__()
        self.norm, self.fc_norm, self.head = vit.norm, vit.fc_norm, vit.head
        self.num_prefix_tokens = vit.num_prefix_tokens

    def forward(self, x, batch):
        logits = VisionTransformer.forward_head(self, self.norm(x))
        return F.cross_entropy(logits, batch.targets, label_smoothing=0.1, reduction="sum")


def blocks_of(vit):
    layers = {f"block{i}": block for i, block in enumerate(vit.blocks)}
    return {"embed": Embed(vit), **layers, "loss": Loss(vit)}


def AXES(c):
    qkv = Stacked(*[("heads", c.num_heads)] * 3)
    axes = {
        "embed.cls_token": (None, None, None),
        "embed.pos_embed": (None, None, None),
        "embed.patch_embed.proj.weight": (None, None, None, None),
        "embed.patch_embed.proj.bias": (None,),
        "block*norm*": (None,),
        "block*.ls?.gamma": (None,),
        "block*.qkv.weight": (qkv, None),
        "block*.qkv.bias": (qkv,),
        "block*.proj.weight": (None, "heads"),
        "block*.proj.bias": (None,),
        "block*.fc1.weight": ("ffn", None),
        "block*.fc1.bias": ("ffn",),
        "block*.fc2.weight": (None, "ffn"),
        "block*.fc2.bias": (None,),
        "loss.norm.*": (None,),
        "loss.head.weight": (None, None),
        "loss.head.bias": (None,),
    }
    return {**axes, "embed.reg_token": (None, None, None)} if c.reg_tokens else axes
