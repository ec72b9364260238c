"""`weft axes`: proposed logical axes for models of users, and the proof that confirms them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli import main
from weft.errors import EXIT_OK, EXIT_USER
from weft.models import FAMILIES

MODELS = Path(__file__).parents[1] / "user_models"
FUSED = 'Stacked(("heads", 4), ("kv_heads", 4), ("kv_heads", 4))'
ROWS = {
    "fused_block": (
        "from weft import Stacked",
        f'"h*.attn.c_attn.weight": ({FUSED}, None),',
        f'"h*.attn.c_attn.bias": ({FUSED},),',
        '"h*.attn.c_proj.weight": (None, "heads"),',
        '"h*.mlp.c_fc.weight": ("ffn", None),',
        '"h*.mlp.c_proj.weight": (None, "ffn"),',
        '"wte.wte.weight": ("vocab", None),',
    ),
    "parallel_block": (
        '"layer*.q_proj.weight": ("heads", None),',
        '"layer*.fc_in.bias": ("ffn",),',
        '"layer*.fc_out.weight": (None, "ffn"),',
        '"head.1.weight": ("vocab", None),',
    ),
}


@pytest.mark.parametrize(
    "name", ["parallel_block", pytest.param("fused_block", marks=pytest.mark.slow)]
)
def test_a_proposal_shards_what_its_author_shards_and_is_proven(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (MODELS / f"{name}.py").read_text()
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace("AXES", "OTHERS"))
    assert main(["axes", str(path)]) == EXIT_OK
    shown = capsys.readouterr().out
    for row in ROWS[name]:
        assert row in shown
    assert "# proven: tp2 equals one device" in shown


def test_what_no_sharding_fits_is_undecided(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["axes", str(MODELS / "head_bias.py"), "--check", "False"]
    assert main(argv) == EXIT_OK
    shown = capsys.readouterr().out
    assert '"layer*.bias": (None, None),' in shown
    assert "# undecided: layer*.k layer*.q layer*.v -> layer*.o: " in shown


POOLED = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    vocab: int = 256
    dim: int = 16
    layers: int = 1


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim) for _ in range(4))

    def forward(self, x):
        pooled = x.unflatten(1, (-1, 4)).mean(2)
        weights = torch.bmm(self.q(pooled), self.k(pooled).mT).softmax(-1)
        y = self.out(torch.bmm(weights, self.v(pooled)))
        return x + y.repeat_interleave(4, 1)


def blocks(c):
    return {"tok": nn.Embedding(c.vocab, c.dim), "layer0": Layer(c), "head": nn.Linear(c.dim, c.vocab)}
"""


def test_attention_over_fewer_tokens_than_the_batch_has_is_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pooled.py"
    path.write_text(POOLED)
    assert main(["axes", str(path), "--check", "False"]) == EXIT_OK
    assert "# undecided: layer*.k layer*.q layer*.v -> layer*.out: " in capsys.readouterr().out


PIXELS = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    image_size: int = 28
    classes: int = 10

class First(nn.Linear):
    def forward(self, images):
        return super().forward(images.flatten(1).to(self.weight.dtype) / 255)

def blocks(c):
    return nn.Sequential(First(784, 32), nn.ReLU(), nn.Linear(32, c.classes))
"""


def test_a_model_that_begins_with_a_linear_has_a_proposal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pixels.py"
    path.write_text(PIXELS)
    assert main(["axes", str(path)]) == EXIT_OK
    shown = capsys.readouterr().out
    assert '"*.weight": (None, None),' in shown
    assert "# proven: tp2 equals one device" in shown


def test_a_word_that_names_no_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["axes"]) == EXIT_USER
    assert "weft axes: names no model" in capsys.readouterr().err


def test_the_tables_that_were_tried_are_forgotten() -> None:
    reference = str(MODELS / "head_bias.py")
    before = FAMILIES[reference]
    assert main(["axes", reference, "--check", "False"]) == EXIT_OK
    assert FAMILIES[reference] is before
