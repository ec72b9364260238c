"""The image classifiers learn, from bytes as from floats, at either image size."""

import pytest
import torch

from weft.models import family
from weft.models.batch import forward, image_batch
from weft.models.init import initialise, named_parameters
from weft.models.mnist import Config


@pytest.mark.parametrize(
    "cfg", [Config(), Config(layers=0), Config(arch="conv", layers=1, dim=8, ffn=64), Config(image_size=8)]
)
def test_it_learns_32_random_images_by_heart(cfg: Config):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (32, 1, cfg.image_size, cfg.image_size), generator=generator, dtype=torch.uint8)
    batch = image_batch(images, torch.randint(10, (32,), generator=generator))
    blocks = family("mnist").blocks(cfg)
    parameters = named_parameters(blocks)
    initialise(parameters, family("mnist").init(cfg), seed=0)
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
    as_floats = forward(blocks, image_batch(images / 255, targets))
    assert torch.equal(as_bytes, as_floats)
