"""A key that would have no effect beside the other keys of a run is rejected."""

from __future__ import annotations

import pytest

from weft.commands.preflight import after_restart
from weft.config.checks import run_checks
from weft.config.load import load
from weft.config.validate import config_checks
from weft.errors import Fault
from weft.models import FAMILIES


def faults_of(words: str) -> tuple[Fault, ...]:
    return run_checks(load(words.split(), FAMILIES), config_checks)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--model.name mnist --sample 4", "sample: mnist reads images and generates no text"),
        ("--eval.source text.txt", "eval.source: is set, and eval.every is 0 (no evaluation)"),
        ("--eval.batches 3", "eval.batches: is set, and eval.every is 0"),
        ("--lora.alpha 8", "lora.alpha: is set, and lora.rank is 0 (no adapters)"),
        ("--guard.max_failures 3", "guard.max_failures: is set, and no guard goes on"),
        ("--data.mix a=1 --data.source b", "data.source: is set, and data.mix names the sources"),
        ("--data.long error", "data.long: is set, and data.packing is 'stream'"),
        ("--run.full_mesh dp4", "run.full_mesh: is set, and run.elastic is False"),
        ("--run.full_mesh dq4", "run.full_mesh: unknown axis 'dq'"),
        ("--transport threads --run.restarts 2", "run.restarts: is set, and ranks as threads"),
        ("--transport threads --run.timeout_s 9", "run.timeout_s: is set, and ranks as threads"),
        ("--transport threads --save.memory_every 2", "save.memory_every: is set, and ranks as"),
        ("--run.restarts 0 --save.memory_every 2", "save.memory_every: is set, and run.restarts"),
    ],
)
def test_a_key_without_effect_is_one_fault_with_a_fix(words: str, line: str) -> None:
    (fault,) = faults_of(words)
    assert str(fault).startswith(line)
    assert fault.fix


@pytest.mark.parametrize(
    "words",
    [
        "--eval.every 5 --eval.source text.txt --eval.batches 3",
        "--lora.rank 4 --lora.alpha 8",
        "--guard.nonfinite skip --guard.max_failures 3",
        "--guard.spike 3 --guard.on_spike rollback --guard.max_failures 3",
        "--data.packing documents --data.long error",
        "--run.elastic True --run.full_mesh dp4",
        "--transport threads --run.restarts 0 --save.memory_every 0",
        "--run.restarts 0 --save.memory_every 0",
        "--run.restarts 2 --run.timeout_s 9 --save.memory_every 2",
    ],
)
def test_a_key_with_an_effect_is_accepted(words: str) -> None:
    assert faults_of(words) == ()


def test_an_elastic_run_names_the_key_of_a_full_mesh_that_is_none() -> None:
    run = after_restart(load(["--run.elastic", "True", "--run.full_mesh", "dq4"], FAMILIES))
    (fault,) = run_checks(run, config_checks)
    assert fault.key == "run.full_mesh"
