"""A user's model with a Hugging Face mapping goes to a folder and back; one without is rejected in one line; adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.saver import newest_path
from weft.cli import main
from weft.core.axes import Box
from weft.errors import EXIT_OK, EXIT_USER
from weft.hf.folder import HfFolder
from weft.models import FAMILIES
from weft.python_api import checked_run
from weft.start.prove_run import prove_config

PLAIN = (Path(__file__).parent / "parallel_block.py").read_text()
MAPPED = (
    PLAIN
    + """

from weft.config.hf.mapping import ConfigMapping, HFMapping, Key, WeightMapping, WeightRule, name_rules

LAYER = {
    "ln.weight": "ln.weight", "ln.bias": "ln.bias", "q_proj.weight": "q.weight", "k_proj.weight": "k.weight",
    "v_proj.weight": "v.weight", "out_proj.weight": "o.weight", "fc_in.weight": "up.weight",
    "fc_in.bias": "up.bias", "fc_out.weight": "down.weight", "fc_out.bias": "down.bias",
}
HF = HFMapping(
    architecture="TinyForCausalLM",
    model_type="tiny",
    config=ConfigMapping(
        keys=(Key("n_layer", "layers"), Key("n_embd", "dim"), Key("n_head", "heads"), Key("vocab_size", "vocab")),
        fixed=(),
    ),
    weights=WeightMapping(
        rules=(
            WeightRule("embed.weight", "wte.weight"),
            WeightRule("head.0.weight", "ln_f.weight"),
            WeightRule("head.0.bias", "ln_f.bias"),
            WeightRule("head.1.weight", "lm_head.weight"),
            WeightRule("head.1.bias", "lm_head.bias"),
            *name_rules("layer{layer}", "h.{layer}", LAYER),
        ),
    ),
)
"""
)
SIZES = "--steps 1 --batch.global_size 2 --batch.micro_size 1 --data.seq_len 8 --transport threads"
KEYS = {"mesh": "tp2", "batch.global_size": 2, "batch.micro_size": 1, "data.seq_len": 8}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the model, with and without a mapping; the working folder."""
    (tmp_path / "mapped.py").write_text(MAPPED)
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    with FAMILIES.restored():
        yield tmp_path


@pytest.mark.slow
def test_a_model_with_a_mapping_is_exported_and_starts_from_the_folder(models: Path) -> None:
    argv = ["train", "mapped.py", *SIZES.split(), "--out", "run"]
    assert main(argv) == EXIT_OK
    assert main(["export", "run", "folder", "--compare", "False"]) == EXIT_OK
    path = newest_path(models / "run")
    assert path is not None
    run = checked_run({**KEYS, "model.from_hf": "folder"}, "mapped.py")
    stored = open_checkpoint(path).section("model")
    read = HfFolder(models / "folder", run.model)
    assert len(stored.shapes) == 25
    for name, shape in stored.shapes.items():
        box = Box.whole(shape)
        assert torch.equal(stored.read(name, box), read.read(name, box)), name
    words = ("mapped.py", *SIZES.split(), "--model.from_hf", "folder", "--out", "again")
    assert main(["train", *words]) == EXIT_OK
    assert prove_config(run, steps=1, full=True).holds


def test_a_model_without_a_mapping_is_rejected_in_one_line(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "plain.py", *SIZES.split(), "--out", "run"]
    assert main(argv) == EXIT_OK
    capsys.readouterr()
    assert main(["export", "run", "folder", "--compare", "False"]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model.name: has no counterpart in transformers")
    (models / "folder").mkdir()
    (models / "folder" / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    words = ("plain.py", "--model.from_hf", "folder", "--out", "again")
    assert main(["train", *words]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown architecture (got 'TinyForCausalLM'" in line


def test_adapters_of_a_users_model_equal_one_device(models: Path) -> None:
    run = checked_run({**KEYS, "lora.rank": 2}, "plain.py")
    report = prove_config(run, steps=1)
    assert report.holds, "\n".join(report.lines())
