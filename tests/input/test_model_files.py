"""Bad model files: one line, exit code 2, under 2 s, nothing written, before any process starts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401 - imported once, not by the first case

from weft.checkpoint.resume import _model_changes
from weft.cli import main
from weft.config.load import load
from weft.errors import EXIT_USER
from weft.models import FAMILIES
from weft.prove.proof import Subject, prove

LIMIT_S = 2.0
GOOD = """
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F
from weft import Extra

@dataclass(frozen=True)
class Config:
    dim: int = 8
    vocab: int = 256

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = nn.Linear(c.dim, 16), nn.Linear(16, c.dim)
        self.calls = 0
    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))

class Sum(nn.Module):
    def forward(self, x, batch):
        return F.cross_entropy(x.flatten(0, 1), batch.targets.flatten(), reduction="sum")

def blocks(c):
    return {"embed": nn.Embedding(c.vocab, c.dim), "layer0": Layer(c), "layer1": Layer(c),
            "head": nn.Linear(c.dim, c.vocab), "loss": Sum()}

AXES = {
    "embed.weight": (None, "embed"),
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "head.weight": (None, "embed"),
    "head.bias": (None,),
}
"""
FORWARD = "return x + self.down(F.relu(self.up(x)))"
CASES: dict[str, tuple[str, str, str]] = {
    "no AXES": ("AXES = {", "OTHER = {", "defines no AXES"),
    "a missing parameter": ('    "head.bias": (None,),\n', "", "misses parameter head.bias"),
    "a parameter named twice": ('"head.bias"', '"head.*"', "names parameter head.weight twice"),
    "a row of another length": (
        '"head.bias": (None,)',
        '"head.bias": (None, None)',
        "does not fit",
    ),
    "a row without a parameter": ("AXES = {", 'AXES = {"tail.*": (None,),', "matches no parameter"),
    "a row that is no axes": (
        "AXES = {",
        'AXES = {"tail.*": None,',
        "row 'tail.*' has no axes (got None",
    ),
    "a row of numbers": (
        "AXES = {",
        'AXES = {"tail.*": (0, 1),',
        "row 'tail.*' has no axes (got (0, 1)",
    ),
    "a key that is no name": ("AXES = {", "AXES = {3: (None,),", "AXES: is no table"),
    "raises on import": ("AXES = {", "1 / 0\nAXES = {", "raises on import, line"),
    "a syntax error": ("AXES = {", "AXES = {{", "SyntaxError"),
    "an import that is missing": ("import torch\n", "import no_such_thing\n", "No module named"),
    "no blocks": ("def blocks", "def stages", "defines no blocks"),
    "blocks raises": ("def blocks(c):", "def blocks(c):\n    c.no_field", "blocks(config) raises"),
    "no dataclass": ("@dataclass(frozen=True)\n", "", "is not a dataclass"),
    "a field without a default": ("vocab: int = 256", "vocab: int", "raises on import"),
    "a field of weft's": ("dim: int = 8", "dim: int = 8\n    preset: int = 1", "weft uses itself"),
    "a declared name of weft's": (
        "dim: int = 8",
        'dim: int = 8\n    kind: str = "dense"',
        "Config.kind is a name that weft uses itself",
    ),
    "an attribute of weft's": (
        "dim: int = 8",
        "dim: int = 8\n    parts: int = 2",
        "Config.parts is a name that weft uses itself",
    ),
    "a changed attribute": (FORWARD, f"self.calls += 1; {FORWARD}", "calls: keeps state outside"),
    "a stored activation": (FORWARD, f"self.kept = x; {FORWARD}", "kept: keeps state outside"),
    "BatchNorm": (
        "def blocks(c):",
        "class Norm(nn.BatchNorm1d):\n"
        "    def forward(self, x):\n"
        "        self.num_batches_tracked += 1\n"
        "        return super().forward(x.transpose(1, 2)).transpose(1, 2)\n\n"
        "def blocks(c):\n"
        '    return {"embed": nn.Embedding(c.vocab, c.dim), "norm": Norm(c.dim, affine=False),\n'
        '            "layer0": Layer(c), "layer1": Layer(c), "head": nn.Linear(c.dim, c.vocab)}\n\n'
        "def unused(c):",
        "norm.num_batches_tracked: keeps state outside",
    ),
    "BatchNorm of its batch in evaluation": (
        "self.calls = 0",
        "self.norm = nn.BatchNorm1d(c.dim, affine=False, track_running_stats=False)",
        "layer0.norm: normalises over the batch, in evaluation, too",
    ),
    "BatchNorm over ranks": (
        "self.calls = 0",
        "self.norm = nn.SyncBatchNorm(c.dim, affine=False)",
        "layer0.norm: normalises over ranks",
    ),
    "a BatchNorm of two blocks": (
        "def blocks(c):",
        "class Norm(nn.BatchNorm1d):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.transpose(1, 2)).transpose(1, 2)\n\n"
        "def blocks(c):\n"
        "    norm = Norm(c.dim, affine=False)\n"
        '    return {"embed": nn.Embedding(c.vocab, c.dim), "norm": norm, "again": norm,\n'
        '            "layer0": Layer(c), "layer1": Layer(c), "head": nn.Linear(c.dim, c.vocab)}\n\n'
        "def unused(c):",
        "again: updates buffers, and is a module of two blocks",
    ),
    "an update of what is no buffer": (
        FORWARD,
        f"import weft; weft.update_buffers(self, x.mean()); {FORWARD}\n"
        "    def update_buffers(self, mean):\n"
        "        self.calls += 1",
        "layer0.calls: is changed by update_buffers, and is no buffer",
    ),
    "an update that reads a parameter": (
        FORWARD,
        f"import weft; weft.update_buffers(self, x.mean()); {FORWARD}\n"
        "    def update_buffers(self, mean):\n"
        "        self.up.weight.sum()",
        "layer0.up.weight: is read by update_buffers",
    ),
    "BatchNorm without statistics": (
        FORWARD,
        "return x + self.down(F.relu(self.up(x - x.mean(dim=(0, 1)))))",
        "layer0: computes a sequence differently where another one is in the batch",
    ),
    "random numbers": (
        FORWARD,
        "return self.down(self.up(x)) * torch.rand_like(x)",
        "draws random numbers",
    ),
    "a mean loss": ('"sum"', '"mean"', "the loss: is no sum over targets"),
    "a mean over each sequence": (
        'batch.targets.flatten(), reduction="sum")',
        'batch.targets.flatten(), reduction="sum") / x.shape[1]',
        "is no sum over targets",
    ),
    "no loss at all": ("return F.cross_entropy(", "return x; F.cross_entropy(", "no sum over"),
    "an unused parameter": (
        FORWARD,
        FORWARD.replace("self.up(x)", "F.linear(x, self.up.weight)"),
        "layer0.up.bias: is a parameter that the loss does not use",
    ),
    "a hook on a gradient": (
        "self.calls = 0",
        "self.up.weight.register_hook(lambda grad: 2 * grad)",
        "layer0.up.weight: has a gradient hook",
    ),
    "a nested backward": (
        FORWARD,
        "import torch.utils.checkpoint as c; return x + c.checkpoint(lambda y: self.down(self.up(y)), x, use_reentrant=True)",
        "use_reentrant=False",
    ),
    "a backward that fails": (
        FORWARD,
        "y = self.up(x).exp(); z = self.down(y); y.add_(1); return x + z",
        "its backward raises RuntimeError",
    ),
    "unknown parameters": (
        "self.calls = 0",
        "self.calls = nn.Parameter(torch.ones(1))",
        "misses parameter layer0.calls and 1 other",
    ),
    "another signature": (
        "def forward(self, x, batch)",
        "def forward(self, x, y, z)",
        "called with",
    ),
    "a forward that fails": (FORWARD, "return x @ x", "its forward"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_model_file_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, line = CASES[name]
    assert old in GOOD
    (tmp_path / "my_model.py").write_text(GOOD.replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    start_s = time.process_time()
    code = main(["train", "my_model.py", "--data.seq_len", "16"])
    assert time.process_time() - start_s < LIMIT_S
    captured = capsys.readouterr()
    assert code == EXIT_USER, captured
    errors = captured.err.splitlines()
    assert line in captured.err
    assert len(errors) == 1
    assert os.listdir(tmp_path) == ["my_model.py"]


def test_a_stage_that_hands_on_a_number_beside_its_tensor_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, an error on the ranks."""
    path = tmp_path / "my_model.py"
    path.write_text(
        GOOD.replace(
            "forward(self, x):",
            "forward(self, pair):\n        x = pair if torch.is_tensor(pair) else pair[0]",
        )
        .replace(FORWARD, f"{FORWARD}, 3")
        .replace('"head": nn', '"one": One(), "head": nn')
        .replace(
            "def blocks",
            "class One(nn.Module):\n    def forward(self, pair): return pair[0]\n\ndef blocks",
        )
    )
    argv = ["train", str(path), "--mesh", "pp2", "--data.seq_len", "16"]
    assert main(argv) == EXIT_USER
    said = "layer0: hands on something that a pipeline stage cannot send (need a tensor, or a tuple"
    assert said in capsys.readouterr().err


def test_a_recurrent_layer_is_given_values(tmp_path: Path) -> None:
    """Before, every layout failed: torch swaps no tensor that a module refers to weakly."""
    path = tmp_path / "my_model.py"
    text = GOOD.replace("self.calls = 0", "self.rnn = nn.GRU(c.dim, c.dim, batch_first=True)")
    text = text.replace(FORWARD, f"x = x + self.rnn(x)[0]; {FORWARD}")
    path.write_text(
        text.replace("AXES = {", 'AXES = {"layer*.rnn.w*": (None, None), "layer*.rnn.b*": (None,),')
    )
    words = [
        str(path),
        "--mesh",
        "dp2",
        "--parallel.zero",
        "3",
        "--data.seq_len",
        "8",
        "--batch.global_size",
        "2",
        "--batch.micro_size",
        "1",
    ]
    report = prove(Subject.of(load(words, FAMILIES), steps=1).in_float64())
    assert report.holds, report


def test_the_good_file_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_model.py").write_text(GOOD)
    assert main(["explain", str(tmp_path / "my_model.py"), "--mesh", "pp2 tp2"]) == 0
    assert "stage 1 on pp1: layer1 ... loss" in capsys.readouterr().out


def test_a_changed_file_is_rejected_by_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my_model.py"
    path.write_text(GOOD)
    words = ["explain", str(path), "--model.digest", "0123456789abcdef"]
    assert main(words) == EXIT_USER
    assert "the model file has changed since the run started" in capsys.readouterr().err


def test_fields_of_the_config_are_flags_with_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my_model.py"
    path.write_text(GOOD.replace("dim: int = 8", "dim: int = 8  # width of the stream"))
    assert main(["train", str(path), "--help"]) == 0
    assert "width of the stream" in capsys.readouterr().out
    argv = ["explain", str(path), "--model.dim", "wide"]
    assert main(argv) == EXIT_USER
    assert "model.dim: wrong type" in capsys.readouterr().err


def test_a_run_resumes_with_the_file_that_it_was_trained_with(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ckpt" / "step-000001"
    (tmp_path / "my_model.py").write_text(GOOD)
    argv = [str(tmp_path / "my_model.py")]
    section = load(argv, FAMILIES).model
    run = {"model": {"digest": "0123456789abcdef"}}
    facts = SimpleNamespace(
        run=run, family=section.name, architecture=section.architecture, code={}
    )
    (fault,) = _model_changes(section, facts, path)
    assert "the model file has changed since" in str(fault)
    assert f"a copy is {tmp_path}/run/model.py" in str(fault)
