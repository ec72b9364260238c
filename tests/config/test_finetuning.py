"""Fine-tuning defaults: lower rates, no weight decay, the model's length, unless the user sets them; and they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.folders import CONFIGS, random_values, write
from weft.cli import main
from weft.config.finetuning import FULL, LORA, MAX_LENGTH
from weft.config.load import load
from weft.config.run import Run
from weft.models import FAMILIES
from weft.start.preflight import training_notes

LLAMA = CONFIGS["llama3"].model_copy(update={"vocab": 256})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("hf") / "llama", LLAMA, random_values(LLAMA)))


def read(*words: str) -> Run:
    return load(words, FAMILIES)


def optimizer_keys(run: Run) -> dict[str, float]:
    return {"optim.lr": run.optim.lr, "optim.weight_decay": run.optim.weight_decay}


def test_a_run_from_scratch_keeps_the_defaults_of_training():
    run = read()
    assert optimizer_keys(run) == {"optim.lr": 3e-3, "optim.weight_decay": 0.1}
    assert run.data.seq_len == 128
    for note in training_notes(run):
        assert "fine-tuning" not in note


def test_a_trained_model_gets_lower_rates_no_decay_and_its_own_length(folder):
    run = read("--model.from_hf", folder)
    assert optimizer_keys(run) == FULL
    assert run.data.seq_len == min(MAX_LENGTH, LLAMA.max_seq_len)


def test_adapters_get_higher_rates_than_a_whole_model_with_and_without_a_folder(folder):
    assert optimizer_keys(read("--model.from_hf", folder, "--lora.rank", "4")) == LORA
    assert optimizer_keys(read("--lora.rank", "4")) == LORA


def test_keys_that_the_user_sets_win_in_a_file_and_as_flags(folder, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("[optim]\nweight_decay = 0.05\n")
    run = read(str(config), "--model.from_hf", folder, "--optim.lr", "1e-4", "--data.seq_len", "16")
    assert run.optim.lr == 1e-4
    assert run.optim.weight_decay == 0.05
    assert run.data.seq_len == 16
    assert not [note for note in training_notes(run) if "fine-tuning" in note]


def train(place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    sizes = (
        "--batch.global_size",
        "2",
        "--batch.micro_size",
        "1",
        "--data.seq_len",
        "8",
        "--steps",
        "1",
    )
    source = (
        "--data.source",
        str(place / "text.txt"),
        "--out",
        str(place / "run"),
        "--transport",
        "threads",
    )
    assert main(["train", *source, *sizes, *words]) == 0
    return capsys.readouterr().err


def test_weft_train_prints_the_defaults_that_it_chose(folder, tmp_path, capsys):
    shown = train(tmp_path, capsys, "--model.from_hf", folder)
    assert "note: fine-tuning defaults: --optim.lr 2e-05 --optim.weight_decay 0\n" in shown
    assert "random weights" not in shown


def test_adapters_of_a_random_model_are_a_warning(tmp_path, capsys):
    sizes = (
        "--model.layers",
        "1",
        "--model.dim",
        "16",
        "--model.heads",
        "2",
        "--model.kv_heads",
        "2",
    )
    shown = train(tmp_path, capsys, *sizes, "--model.ffn", "32", "--lora.rank", "2")
    assert "note: the base model of the LoRA adapters has random weights" in shown
    assert "--model.from_hf or --lora.base" in shown
