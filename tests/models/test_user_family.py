"""Models of users on the meta device: parameters never have memory, buffers have the values of a whole build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.generate.job import max_positions
from weft.models import FAMILIES
from weft.models.common.experts import Experts
from weft.models.common.moe import Choice, MoE, Router
from weft.models.user_facts import facts_of
from weft.train.init_from import meta_modules

pytestmark = pytest.mark.usefixtures("trusted_code")

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass(frozen=True)
class Config:
    dim: int = 4

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c.dim, c.dim)
        self.has_memory = not self.proj.weight.is_meta
        self.other = nn.Linear(c.dim, c.dim, bias=False)
        self.other.weight = self.proj.weight
        {line}

    def forward(self, x):
        return self.proj(x)

def blocks(c):
    return {{"embed": nn.Embedding(256, c.dim), "layer0": Layer(c)}}

AXES = {{}}
"""


def layers(tmp_path: Path, line: str) -> tuple[nn.Module, nn.Module]:
    """The layer without memory, and the one with values."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(line=line), encoding="utf-8")
    family = FAMILIES[str(path)]
    config = family.Config()
    with torch.device("meta"):
        without: Mapping[str, nn.Module] = family.blocks(config)
    return without["layer0"], family.blocks(config)["layer0"]


def test_parameters_of_a_large_model_are_never_allocated(tmp_path: Path) -> None:
    line = "self.register_buffer('scale', torch.full((2,), 3.0))"
    layer, whole = layers(tmp_path, line)
    assert not layer.has_memory
    assert layer.proj.weight.is_meta
    assert layer.other.weight is layer.proj.weight
    assert layer.scale.equal(whole.scale)


@pytest.mark.parametrize(
    "line",
    [
        "self.register_buffer('scale', torch.randn(2))",
        "self.register_buffer('scale', self.proj.weight.detach()[0].clone())",
        "self.register_buffer('scale', torch.full((2,), float(self.proj.weight.abs().max())))",
    ],
    ids=["drawn", "of a parameter", "reads a parameter"],
)
def test_buffers_that_depend_on_parameters_or_draws_have_their_values(
    tmp_path: Path, line: str
) -> None:
    layer, whole = layers(tmp_path, line)
    assert layer.has_memory
    assert layer.proj.weight.is_meta
    assert not layer.scale.is_meta
    assert layer.scale.equal(whole.scale)


def test_drawn_buffers_are_those_of_one_device_on_every_rank(tmp_path: Path) -> None:
    """Ranks draw no parameters while they build; before, their Fourier features were others."""
    path = tmp_path / "model.py"
    line = "self.register_buffer('scale', torch.randn(2))"
    path.write_text(MODEL.format(line=line), encoding="utf-8")
    family = FAMILIES[str(path)]
    config = family.Config()
    on_rank = meta_modules(lambda: family.blocks(config))["layer0"]
    assert on_rank.scale.equal(family.blocks(config)["layer0"].scale)


def test_a_config_that_blocks_change_is_changed_for_them_alone(tmp_path: Path) -> None:
    """Its dataclass needs not be frozen: every use of it has one of its own."""
    path = tmp_path / "model.py"
    text = MODEL.format(line="c.dim += 1").replace("(frozen=True)", "")
    path.write_text(text, encoding="utf-8")
    family = FAMILIES[str(path)]
    config = family.Config()
    shapes = [family.blocks(config)["embed"].weight.shape for _ in range(2)]
    assert shapes == [(256, 4), (256, 4)]
    assert config.dim == 4


@pytest.mark.parametrize("field", ["max_seq_len", "context", "block_size"])
def test_generation_ends_where_a_field_names_the_context(tmp_path: Path, field: str) -> None:
    """Before, only `max_seq_len` counted: nanoGPT's table of positions ended with an IndexError."""
    path = tmp_path / "model.py"
    text = MODEL.format(line="").replace("dim: int = 4", f"dim: int = 4\n    {field}: int = 24")
    path.write_text(text, encoding="utf-8")
    assert max_positions(FAMILIES[str(path)].Config()) == 24


def test_a_model_without_a_context_computes_any_position(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(line=""), encoding="utf-8")
    assert max_positions(FAMILIES[str(path)].Config()) is None


def test_a_users_mixture_has_linears_of_experts_and_none_of_its_router() -> None:
    """The router uses the weight of its linear alone: an adapter or fp8 of it would have no effect."""
    layer = nn.Module()
    layer.fc = nn.Linear(8, 8)
    choice = Choice(num_experts=4, top_k=2, scoring="softmax")
    layer.mlp = MoE(router=Router(8, choice), experts=Experts(8, 16, num_experts=4))
    facts = facts_of({"layer0": layer}, {}, label="mine")
    assert facts.linears == {"layer0.fc": (8, 8)}
    assert facts.expert_linears == {
        "layer0.mlp.experts.gate": (16, 8),
        "layer0.mlp.experts.up": (16, 8),
        "layer0.mlp.experts.down": (8, 16),
    }
