"""ConvNeXt: a LayerNorm of two data formats, permutes, gamma as a parameter, stages in two ModuleLists."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from weft import DropPath, InputSpec  # weft


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps
        self.data_format = data_format
        if self.data_format not in ["channels_last", "channels_first"]:
            raise NotImplementedError
        self.normalized_shape = (normalized_shape,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, dim, drop_path=0.0, layer_scale_init_value=1e-6):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = (
            nn.Parameter(layer_scale_init_value * torch.ones((dim)), requires_grad=True)
            if layer_scale_init_value > 0
            else None
        )
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        x = input + self.drop_path(x)
        return x


@dataclass
class ConvNeXtConfig:
    in_chans: int = 3
    num_classes: int = 10
    depths: tuple[int, ...] = (1, 2)
    dims: tuple[int, ...] = (8, 12)
    drop_path_rate: float = 0.0
    layer_scale_init_value: float = 0.1
    head_init_scale: float = 1.0


class ConvNeXt(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        stem = nn.Sequential(
            nn.Conv2d(c.in_chans, c.dims[0], kernel_size=4, stride=4),
            LayerNorm(c.dims[0], eps=1e-6, data_format="channels_first"),
        )
        self.downsample_layers.append(stem)
        for i in range(len(c.dims) - 1):
            downsample_layer = nn.Sequential(
                LayerNorm(c.dims[i], eps=1e-6, data_format="channels_first"),
                nn.Conv2d(c.dims[i], c.dims[i + 1], kernel_size=2, stride=2),
            )
            self.downsample_layers.append(downsample_layer)
        self.stages = nn.ModuleList()
        dp_rates = [x.item() for x in torch.linspace(0, c.drop_path_rate, sum(c.depths))]
        cur = 0
        for i in range(len(c.dims)):
            stage = nn.Sequential(
                *[
                    Block(c.dims[i], dp_rates[cur + j], c.layer_scale_init_value)
                    for j in range(c.depths[i])
                ]
            )
            self.stages.append(stage)
            cur += c.depths[i]
        self.norm = nn.LayerNorm(c.dims[-1], eps=1e-6)
        self.head = nn.Linear(c.dims[-1], c.num_classes)
        self.apply(self._init_weights)
        self.head.weight.data.mul_(c.head_init_scale)
        self.head.bias.data.mul_(c.head_init_scale)

    def _init_weights(self, m):
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.constant_(m.bias, 0)

    def forward_features(self, x):
        for i in range(len(self.stages)):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        x = self.forward_features(x)
        return self.head(x)


def train_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["targets"])


# weft

Config = ConvNeXtConfig
blocks = ConvNeXt


def INPUTS(c):
    return {
        "image": InputSpec((c.in_chans, 16, 16)),
        "targets": InputSpec((), "int64", below=c.num_classes),
    }


class Head(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.norm, self.head = net.norm, net.head

    def forward(self, x):
        return self.head(self.norm(x.mean([-2, -1])))


class Stem(nn.Module):
    def __init__(self, stem):
        super().__init__()
        self.stem = stem

    def forward(self, x):
        return self.stem(x.to(self.stem[0].weight.dtype))


def blocks_of(net):
    chain = {"stem": Stem(net.downsample_layers[0])}
    for i, stage in enumerate(net.stages):
        if i:
            chain[f"down{i}"] = net.downsample_layers[i]
        chain.update({f"stage{i}_{j}": block for j, block in enumerate(stage)})
    return {**chain, "head": Head(net)}


WITHOUT_GAMMA = {
    "stem.stem.0.weight": (None,) * 4,
    "stem.stem.1.weight": (None,),
    "down*.0.weight": (None,),
    "down*.1.weight": (None,) * 4,
    "stage*.dwconv.weight": (None,) * 4,
    "stage*.norm.weight": (None,),
    "stage*.pwconv1.weight": ("ffn", None),
    "stage*.pwconv1.bias": ("ffn",),
    "stage*.pwconv2.weight": (None, "ffn"),
    "head.norm.weight": (None,),
    "head.head.weight": (None, None),
    "stem*.bias": (None,),
    "down*.bias": (None,),
    "stage*.dwconv.bias": (None,),
    "stage*.norm.bias": (None,),
    "stage*.pwconv2.bias": (None,),
    "head.*.bias": (None,),
}


def AXES(c):
    gamma = {"stage*.gamma": (None,)} if c.layer_scale_init_value > 0 else {}
    return {**WITHOUT_GAMMA, **gamma}
