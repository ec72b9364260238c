"""torchvision's ResNet: bottlenecks by _make_layer, zero-initialised last norms, a stem, in-place ReLU."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from weft import InputSpec  # weft


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


def conv1x1(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class Bottleneck(nn.Module):
    expansion: int = 4

    def __init__(self, inplanes, planes, stride=1, downsample=None, norm_layer=None):
        super().__init__()
        if norm_layer is None:
            norm_layer = nn.BatchNorm2d
        self.conv1 = conv1x1(inplanes, planes)
        self.bn1 = norm_layer(planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn2 = norm_layer(planes)
        self.conv3 = conv1x1(planes, planes * self.expansion)
        self.bn3 = norm_layer(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


@dataclass
class ResNetConfig:
    layers: tuple[int, ...] = (2, 2)
    width: int = 4
    num_classes: int = 10
    zero_init_residual: bool = True


class ResNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self._norm_layer = nn.BatchNorm2d
        self.inplanes = c.width
        self.conv1 = nn.Conv2d(3, self.inplanes, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = self._norm_layer(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(Bottleneck, c.width, c.layers[0])
        self.layer2 = self._make_layer(Bottleneck, 2 * c.width, c.layers[1], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * c.width * Bottleneck.expansion, c.num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, (nn.BatchNorm2d, nn.GroupNorm)):
                nn.init.constant_(m.weight, 1)
                nn.init.constant_(m.bias, 0)
        if c.zero_init_residual:
            for m in self.modules():
                if isinstance(m, Bottleneck) and m.bn3.weight is not None:
                    nn.init.constant_(m.bn3.weight, 0)

    def _make_layer(self, block, planes, blocks, stride=1):
        norm_layer = self._norm_layer
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * block.expansion, stride),
                norm_layer(planes * block.expansion),
            )
        layers = [block(self.inplanes, planes, stride, downsample, norm_layer)]
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(block(self.inplanes, planes, norm_layer=norm_layer))
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def train_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["targets"])


# weft

Config = ResNetConfig
blocks = ResNet
SIZE = 16


def INPUTS(c):
    return {
        "image": InputSpec((3, SIZE, SIZE)),
        "targets": InputSpec((), "int64", below=c.num_classes),
    }


class Stem(nn.Sequential):
    def forward(self, x):
        return super().forward(x.to(self[0].weight.dtype))


def blocks_of(net):
    layers = {f"block{i}": block for i, block in enumerate([*net.layer1, *net.layer2])}
    head = nn.Sequential(net.avgpool, nn.Flatten(1), net.fc)
    return {"stem": Stem(net.conv1, net.bn1, net.relu, net.maxpool), **layers, "head": head}


AXES = {
    "stem.0.weight": (None,) * 4,
    "stem.1.*": (None,),
    "block*.conv?.weight": (None,) * 4,
    "block*.downsample.0.weight": (None,) * 4,
    "block*.downsample.1.*": (None,),
    "block*.bn*": (None,),
    "head.2.weight": (None, None),
    "head.2.bias": (None,),
}
