"""A key that has no effect beside the other keys of a run is rejected, or named in a note."""

from __future__ import annotations

import pytest

from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.errors import Fault
from weft.models import FAMILIES
from weft.start.preflight import after_restart, training_notes
from weft.train.run_records import optimizer_text

LAUNCHER = {
    "WORLD_SIZE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def faults_of(words: str) -> tuple[Fault, ...]:
    return run_checks(load(words.split(), FAMILIES), config_checks)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--model.name mnist --sample 4", "sample: mnist reads images and generates no text"),
        ("--data.mix a=1 --data.source b", "data.source: is set, and data.mix names the sources"),
        ("--run.full_mesh dp4", "run.full_mesh: is set, and run.elastic is False"),
        ("--run.full_mesh dq4", "run.full_mesh: unknown axis 'dq'"),
        ("--transport threads --run.restarts 2", "run.restarts: is set, and ranks as threads"),
        ("--transport threads --save.memory_every 2", "save.memory_every: is set, and ranks as"),
    ],
)
def test_a_contradiction_is_one_fault_with_a_fix(words: str, line: str) -> None:
    (fault,) = faults_of(words)
    assert str(fault).startswith(line)
    assert fault.fix


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--eval.source text.txt", "eval.source: is set, and eval.every is 0 (no evaluation)"),
        ("--eval.batches 3", "eval.batches: is set, and eval.every is 0"),
        ("--sample_every 5", "sample_every: is set, and sample is 0 (no texts)"),
        ("--dpo.loss_type orpo", "dpo.loss_type: is set, and loss is 'cross_entropy'"),
        ("--lora.alpha 8", "lora.alpha: is set, and lora.rank is 0 (no adapters)"),
        ("--guard.max_failures 3", "guard.max_failures: is set, and no guard goes on"),
        ("--data.long error", "data.long: is set, and data.packing is 'stream'"),
        ("--run.restarts 0 --save.memory_every 2", "save.memory_every: is set, and run.restarts"),
        ("--optim.cooldown 0.5", "optim.cooldown: is set, and optim.decay is 'cosine'"),
        ("--optim.decay constant --optim.min_lr 0.2", "optim.min_lr: is set, and optim.decay is"),
        ("--optim.momentum 0.8", "optim.momentum: is set, and adamw reads no such key"),
        ("--optim.name sgd --optim.betas 0.9 0.9", "optim.betas: is set, and sgd reads no such"),
        ("--optim.name lion --optim.eps 1e-6", "optim.eps: is set, and lion reads no such key"),
        ("--optim.name muon --optim.momentum 0.8", "optim.momentum: is set, and muon and adamw"),
        ("--optim.name adafactor --optim.betas 0.9 0.9", "optim.betas: is set, and adafactor"),
        ("--optim.min_lr 1", "optim.min_lr: is all of optim.lr, so that the rate does not decay"),
    ],
)
def test_a_key_of_what_is_switched_off_is_a_note(words: str, line: str) -> None:
    run = load(words.split(), FAMILIES)
    assert run_checks(run, config_checks) == ()
    notes = training_notes(run)
    (note,) = [note for note in notes if "is set" in note or "is all of" in note]
    assert note.startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--optim.lr 0.003 --optim.min_lr 0.001",
            "optim.min_lr 0.001 is a share of optim.lr: the rate ends at 3e-06; "
            "--optim.min_lr 0.333333 ends it at 0.001",
        ),
        (
            "--optim.lr 3e-4 --optim.min_lr 0.001",
            "optim.min_lr 0.001 is a share of optim.lr: the rate ends at 3e-07",
        ),
    ],
)
def test_a_share_that_looks_like_a_rate_is_noted_at_every_start(words: str, line: str) -> None:
    run = load(words.split(), FAMILIES)
    assert [note for note in training_notes(run) if "min_lr" in note] == [line]
    text = optimizer_text(run.optim, run.lora, run.model)
    assert f" to 0.001 x lr = {run.optim.last_lr:g}, " in text


@pytest.mark.parametrize(
    "words", ["", "--optim.lr 1", "--optim.min_lr 0.01", "--optim.min_lr 0", "--optim.min_lr 0.05"]
)
def test_a_usual_share_is_in_the_optimizer_line_alone(words: str) -> None:
    run = load(words.split(), FAMILIES)
    assert not [note for note in training_notes(run) if "min_lr" in note]


def test_the_last_rate_has_no_digits_of_rounding() -> None:
    assert load([], FAMILIES).optim.last_lr == 0.0003


def test_betas_of_a_group_whose_optimizer_has_none_are_a_note() -> None:
    groups = ("embed*: optimizer=sgd betas=0.9/0.99", "*norm*: betas=0.9/0.99")
    run = load(["--optim.groups", *groups], FAMILIES)
    (note,) = [note for note in training_notes(run) if "betas" in note]
    assert note.startswith("optim.groups: betas of 'embed*' are set, and sgd reads none")


def test_keys_without_effect_under_a_launcher_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load(["--port", "29501", "--save.memory_every", "2"], FAMILIES)
    for note in training_notes(run):
        assert "is not used" not in note
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    port, memory = [note for note in training_notes(run) if "is not used" in note]
    assert port.startswith("port 29501")
    assert memory.startswith("save.memory_every 2")


@pytest.mark.parametrize(
    "words",
    [
        "--eval.every 5 --eval.source text.txt --eval.batches 3",
        "--lora.rank 4 --lora.alpha 8",
        "--optim.decay wsd --optim.cooldown 0.5",
        "--optim.decay constant --optim.lr 1e-5",
        "--optim.betas 0.8 0.9 --optim.eps 1e-6",
        "--optim.name sgd --optim.momentum 0.8",
        "--optim.name muon --optim.eps 1e-6 --optim.options.momentum 0.8",
        "--guard.nonfinite skip --guard.max_failures 3",
        "--guard.spike 3 --guard.on_spike rollback --guard.max_failures 3",
        "--data.packing documents --data.long error",
        "--run.elastic True --run.full_mesh dp4",
        "--transport threads --run.restarts 0 --save.memory_every 0",
        "--run.restarts 0 --save.memory_every 0",
        "--run.restarts 2 --run.timeout_s 9 --save.memory_every 2",
        "--transport threads --run.timeout_s 9",
    ],
)
def test_a_key_with_an_effect_is_accepted(words: str) -> None:
    run = load(words.split(), FAMILIES)
    assert run_checks(run, config_checks) == ()
    for note in training_notes(run):
        assert "is set" not in note


def test_an_elastic_run_names_the_key_of_a_full_mesh_that_is_none() -> None:
    run = after_restart(load(["--run.elastic", "True", "--run.full_mesh", "dq4"], FAMILIES))
    (fault,) = run_checks(run, config_checks)
    assert fault.key == "run.full_mesh"
