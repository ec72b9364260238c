"""Models that cast inside: proved within the bounds of that type, and rejected where they do not compute in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.load import load
from weft.errors import PlanError
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.subject import Subject

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass(frozen=True)
class Config:
    dim: int = 16
    vocab: int = 256

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(0.1, 1, c.dim))
        self.up, self.down = nn.Linear(c.dim, 32), nn.Linear(32, c.dim)

    def forward(self, x):
        decay = -torch.exp(self.log_rate.float())
        return x + self.down(torch.tanh(self.up((x * torch.exp(decay))CAST)))

def blocks(c):
    return {"embed": nn.Embedding(c.vocab, c.dim), "layer0": Layer(c), "head": nn.Linear(c.dim, c.vocab)}

AXES = {"embed.weight": (None, None), "layer0.log_rate": (None,), "layer0.up.weight": ("ffn", None),
        "layer0.up.bias": ("ffn",), "layer0.down.weight": (None, "ffn"), "layer0.down.bias": (None,),
        "head.weight": (None, None), "head.bias": (None,)}
"""
SIZES = ("--batch.global_size", "8", "--batch.micro_size", "2", "--data.seq_len", "16")


def subject(tmp_path: Path, cast: str, *words: str) -> Subject:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL.replace("CAST", cast))
    return Subject.of(load([str(path), *SIZES, *words], FAMILIES), steps=2)


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_a_float32_cast_inside_float64_is_no_difference(tmp_path: Path, mesh: str) -> None:
    """As in mamba-minimal. Before: not equal, "the right values in another order (permutation)"."""
    with FAMILIES.restored():
        report = prove(subject(tmp_path, "", "--mesh", mesh).in_float64())
    assert report.holds, "\n".join(report.lines())
    assert "layer0 casts to float32, whatever the types of the run" in "\n".join(report.lines())
    (comparison,) = report.passes
    assert max(bound.bound for bound in comparison.bounds) < 1e-3


def test_a_cast_to_the_type_of_the_run_is_none(tmp_path: Path) -> None:
    with FAMILIES.restored():
        plain = subject(tmp_path, "", "--mesh", "dp2")
        assert plain.types.inner is None
        assert not plain.in_float64().types.is_exact


def test_a_model_that_fails_in_float64_is_rejected_by_name(tmp_path: Path) -> None:
    """Before, an error of torch on the ranks."""
    with FAMILIES.restored(), pytest.raises(PlanError) as caught:
        subject(tmp_path, ".float()", "--mesh", "dp2").in_float64()
    (fault,) = caught.value.faults
    assert "my_model: layer0: does not compute in float64" in str(fault)
    assert "x.to(self.weight.dtype)" in str(fault)


def test_tensors_that_a_coarse_cast_moves_by_more_than_a_hundredth_do_not_count(
    tmp_path: Path,
) -> None:
    reports = {}
    for name, cast in {"coarse": ".bfloat16().double()", "fine": ""}.items():
        (tmp_path / name).mkdir()
        with FAMILIES.restored():
            run = subject(tmp_path / name, cast, "--mesh", "dp2").in_float64()
            reports[name] = prove(run)
    coarse, fine = reports["coarse"], reports["fine"]
    assert coarse.holds
    assert fine.holds
    assert coarse.compared < fine.compared
    assert any(note.startswith("not counted: ") for note in coarse.notes)
    assert not any(note.startswith("not counted: ") for note in fine.notes)
