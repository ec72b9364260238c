"""The image classifiers: shapes, bytes and floats as pixels, both architectures train."""

import pytest
import torch
import torch.nn.functional as F

from weft.models import family
from weft.models.common.batch import forward, image_batch
from weft.models.common.init import init_params, named_parameters
from weft.models.mnist.config import Config


@pytest.mark.parametrize(
    "cfg",
    [
        Config(),
        Config(layers=0),
        Config(arch="conv", layers=1, dim=8, ffn=64),
        Config(image_size=8),
    ],
)
def test_it_learns_32_random_images_by_heart(cfg: Config):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        256, (32, 1, cfg.image_size, cfg.image_size), generator=generator, dtype=torch.uint8
    )
    targets_B = torch.randint(10, (32,), generator=generator)
    batch = image_batch(images, targets_B)
    blocks = family("mnist").blocks(cfg)
    parameters = named_parameters(blocks)
    init_params(parameters, family("mnist").init(cfg), seed=0)
    optimizer = torch.optim.AdamW(parameters.values(), lr=2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (forward(blocks, batch) / 32).backward()
        optimizer.step()
    assert forward(blocks, batch).item() / 32 < 0.05


@pytest.mark.parametrize("arch", ["mlp", "conv"])
def test_bytes_are_scaled_and_floats_are_taken_as_they_are(arch):
    blocks = family("mnist").blocks(Config(arch=arch))
    images = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    targets = torch.zeros(4, dtype=torch.int64)
    as_bytes = forward(blocks, image_batch(images, targets))
    batch = image_batch(images / 255, targets)
    as_floats = forward(blocks, batch)
    assert torch.equal(as_bytes, as_floats)


def linear(x, p, name):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def conv(x, p, name):
    weight = p[f"{name}.weight"]
    bias = p[f"{name}.bias"]
    return F.conv2d(x, weight, bias, padding=1)


def relu_mlp(images, p):
    x = F.relu(linear(images.flatten(1), p, "embed.proj"))
    for i in range(2):
        hidden = F.relu(linear(x, p, f"layer{i}.up"))
        x = F.relu(linear(hidden, p, f"layer{i}.down"))
    return linear(x, p, "head.proj")


def relu_conv(images, p):
    features = F.relu(conv(images, p, "embed.conv"))
    x = F.max_pool2d(features, 2)
    for i in range(2):
        x = F.relu(conv(x, p, f"layer{i}.conv"))
    pooled = F.max_pool2d(x, 2).flatten(1)
    hidden = F.relu(linear(pooled, p, "head.up"))
    return linear(hidden, p, "head.down")


@pytest.mark.parametrize(("arch", "written_out"), [("mlp", relu_mlp), ("conv", relu_conv)])
def test_the_chain_is_the_network_written_out(arch, written_out):
    torch.manual_seed(0)
    blocks = family("mnist").blocks(Config(arch=arch, layers=2, dim=8, ffn=12))
    images = torch.rand(5, 1, 28, 28)
    logits = forward(
        {name: block for name, block in blocks.items() if name != "loss"},
        image_batch(images, images),
    )
    assert torch.equal(logits, written_out(images, named_parameters(blocks)))
