"""lucidrains' ViT: Rearrange as a layer, ModuleList of pairs, a class token by repeat, positions of a pair of sizes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from weft import InputSpec, Stacked  # weft


def pair(t):
    return t if isinstance(t, tuple) else (t, t)


class Rearrange(nn.Module):
    """b c (h p1) (w p2) -> b (h w) (p1 p2 c)"""

    def __init__(self, p1, p2):
        super().__init__()
        self.p1, self.p2 = p1, p2

    def forward(self, x):
        b, c, hh, ww = x.shape
        x = x.reshape(b, c, hh // self.p1, self.p1, ww // self.p2, self.p2)
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        project_out = not (heads == 1 and dim_head == dim)
        self.dim_head = dim_head  # weft
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = (
            nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))
            if project_out
            else nn.Identity()
        )

    def forward(self, x):
        x = self.norm(x)
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        d = self.dim_head  # weft
        q, k, v = map(lambda t: t.unflatten(2, (-1, d)).transpose(1, 2), qkv)  # weft
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.attend(dots)
        attn = self.dropout(attn)
        out = torch.matmul(attn, v)
        out = out.transpose(1, 2).flatten(2)
        return self.to_out(out)


class Transformer(nn.Module):
    def __init__(self, dim, depth, heads, dim_head, mlp_dim, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        Attention(dim, heads=heads, dim_head=dim_head, dropout=dropout),
                        FeedForward(dim, mlp_dim, dropout=dropout),
                    ]
                )
            )

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


@dataclass
class ViTConfig:
    size: int = 16
    patch_size: int = 4
    num_classes: int = 10
    dim: int = 24
    depth: int = 2
    heads: int = 4
    dim_head: int = 8
    mlp_dim: int = 48
    pool: str = "cls"
    dropout: float = 0.0
    emb_dropout: float = 0.0


class ViT(nn.Module):
    def __init__(self, c):
        super().__init__()
        image_height, image_width = pair(c.size)
        patch_height, patch_width = pair(c.patch_size)
        num_patches = (image_height // patch_height) * (image_width // patch_width)
        patch_dim = 3 * patch_height * patch_width
        assert c.pool in {"cls", "mean"}
        num_cls_tokens = 1 if c.pool == "cls" else 0
        self.to_patch_embedding = nn.Sequential(
            Rearrange(patch_height, patch_width),
            nn.LayerNorm(patch_dim),
            nn.Linear(patch_dim, c.dim),
            nn.LayerNorm(c.dim),
        )
        self.cls_token = nn.Parameter(torch.randn(num_cls_tokens, c.dim))
        self.pos_embedding = nn.Parameter(torch.randn(num_patches + num_cls_tokens, c.dim))
        self.dropout = nn.Dropout(c.emb_dropout)
        self.transformer = Transformer(c.dim, c.depth, c.heads, c.dim_head, c.mlp_dim, c.dropout)
        self.pool = c.pool
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Linear(c.dim, c.num_classes)

    def forward(self, img):
        return self.classify(self.transformer(self.embed(img)))

    def embed(self, img):
        x = self.to_patch_embedding(img)
        cls_tokens = self.cls_token[None].expand(img.shape[0], -1, -1)
        x = torch.cat((cls_tokens, x), dim=1)
        seq = x.shape[1]
        x = x + self.pos_embedding[:seq]
        return self.dropout(x)

    def classify(self, x):
        x = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        x = self.to_latent(x)
        return self.mlp_head(x)


def train_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["targets"])


# weft

Config = ViTConfig
blocks = ViT


def INPUTS(c):
    return {
        "image": InputSpec((3, c.size, c.size)),
        "targets": InputSpec((), "int64", below=c.num_classes),
    }


class Embed(nn.Module):
    embed = ViT.embed

    def __init__(self, vit):
        super().__init__()
        self.to_patch_embedding, self.dropout = vit.to_patch_embedding, vit.dropout
        self.cls_token, self.pos_embedding = vit.cls_token, vit.pos_embedding

    def forward(self, img):
        return self.embed(img.to(self.cls_token.dtype))


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attn, self.ff = layer

    def forward(self, x):
        x = self.attn(x) + x
        return self.ff(x) + x


class Head(nn.Module):
    classify = ViT.classify

    def __init__(self, vit):
        super().__init__()
        self.norm, self.to_latent, self.mlp_head = vit.transformer.norm, vit.to_latent, vit.mlp_head
        self.pool = vit.pool

    def forward(self, x):
        return self.classify(self.norm(x))


def blocks_of(vit):
    layers = {f"layer{i}": Layer(layer) for i, layer in enumerate(vit.transformer.layers)}
    return {"embed": Embed(vit), **layers, "head": Head(vit)}


def AXES(c):
    qkv = Stacked(*[("heads", c.heads)] * 3)
    return {
        "embed.cls_token": (None, None),
        "embed.pos_embedding": (None, None),
        "embed.to_patch_embedding.2.weight": (None, None),
        "embed.to_patch_embedding.[13].weight": (None,),
        "embed.*.bias": (None,),
        "layer*.norm.*": (None,),
        "layer*.to_qkv.weight": (qkv, None),
        "layer*.to_out.0.weight": (None, "heads"),
        "layer*.to_out.0.bias": (None,),
        "layer*.net.0.*": (None,),
        "layer*.net.1.weight": ("ffn", None),
        "layer*.net.1.bias": ("ffn",),
        "layer*.net.4.weight": (None, "ffn"),
        "layer*.net.4.bias": (None,),
        "head.norm.*": (None,),
        "head.mlp_head.weight": (None, None),
        "head.mlp_head.bias": (None,),
    }
