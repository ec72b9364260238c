"""Which linears are in fp8, what is rejected of `precision.fp8_exclude`, and what GPUs take."""

from __future__ import annotations

import pytest

from weft.config.fp8 import fp8_linears, fp8_notes
from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.models import FAMILIES
from weft.start.rules.fp8_on_gpus import faults_on_gpus

FP8 = ("--precision.linears", "fp8")
BFLOAT16 = ("--precision.compute", "bfloat16")


def run(*words: str) -> Run:
    return load(list(words), FAMILIES)


def faults(*words: str) -> list[str]:
    return [str(fault) for fault in run_checks(run(*words), config_checks)]


def test_all_linears_of_layers_are_in_fp8_but_those_that_patterns_name() -> None:
    found = run(*FP8, "--precision.fp8_exclude", "q", "layer[1-3].mlp.*")
    names = fp8_linears(found.precision, found.model)
    assert len(names) == 4 * 3 + 3
    assert "layer0.mlp.up" in names
    assert not {"layer0.attn.q", "layer1.mlp.up", "head.proj"} & set(names)
    assert fp8_linears(run().precision, found.model) == ()


def test_the_note_says_what_is_in_fp8_and_what_is_not() -> None:
    found = run(*FP8, "--model.name", "qwen3-moe")
    (note,) = fp8_notes(found.precision, found.model)
    assert "16 linears (q, k, v, o); in float32: weight gradients, the output" in note
    assert note.endswith("routers, routed experts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision.fp8_exclude", "q"), "names linears, and precision.linears is default"),
        ((*FP8, "--precision.fp8_exclude", "qq"), "no linear of llama3 in fp8 has this name"),
        ((*FP8, "--precision.fp8_exclude", "*"), "leaves no linear in fp8"),
        ((*FP8, "--model.name", "mnist"), "mnist has no attention or feed-forward linears"),
    ],
)
def test_patterns_that_mean_nothing_are_rejected(words: tuple[str, ...], message: str) -> None:
    (fault,) = faults(*words)
    assert message in fault


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("words", "name", "message"),
    [
        (BFLOAT16, A100, "this GPU has no products in fp8"),
        ((), H100, "is not the type of the operands"),
        ((*BFLOAT16, "--mesh", "tp4", "--model.ffn", "160"), H100, "layer0.mlp.gate has sizes"),
        ((*BFLOAT16, "--mesh", "tp2"), H100, ""),
        (BFLOAT16, "another GPU", ""),
    ],
)
def test_what_gpus_do_not_take_is_rejected(words: tuple[str, ...], name: str, message: str) -> None:
    found = [str(fault) for fault in faults_on_gpus(run(*FP8, *words), (name,))]
    assert len(found) == bool(message)
    assert message in "".join(found)
