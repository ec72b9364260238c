"""Which linears are in fp8, what is rejected of `precision.fp8_exclude`, and what GPUs take."""

from __future__ import annotations

import pytest

from weft.config.fp8 import fp8_linears, fp8_notes
from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.models import FAMILIES
from weft.models.common.experts import expert_matrices
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
    assert "16 linears (q, k, v, o) and routed experts of 4 layers (gate, up, down)" in note
    assert note.endswith("; in float32: weight gradients, the output projection, routers")
    without = run(*FP8, "--model.name", "qwen3-moe", "--precision.fp8_exclude", "experts.*", "q")
    (note,) = fp8_notes(without.precision, without.model)
    assert "of 12 linears (k, v, o); in float32" in note
    assert note.endswith("routers, what experts.* names, what q names")


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek", "hf:mixtral", "hf:gpt_oss"])
def test_experts_are_excluded_by_their_names(name: str) -> None:
    found = run(*FP8, "--model.name", name, "--precision.fp8_exclude", "experts.down*", "attn.*")
    experts = found.model.expert_linears()
    left = set(fp8_linears(found.precision, found.model))
    kept = {each for each in experts if "down" not in each.rpartition(".")[2]}
    assert kept
    assert kept == left & set(experts)


def test_every_matrix_of_experts_is_listed() -> None:
    """A family's list against its parameters."""
    for name in ("qwen3-moe", "deepseek"):
        model = run("--model.name", name).model
        blocks = FAMILIES[name].blocks(model)
        found = {
            f"{block}.{path}.{matrix}": sizes
            for block, layer in blocks.items()
            for path, module in layer.named_modules()
            for matrix, sizes in expert_matrices(module).items()
        }
        assert found == model.expert_linears()


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


NARROW_EXPERTS = ("--mesh", "tp2", "--model.name", "qwen3-moe", "--model.expert_ffn", "48")
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("words", "name", "message"),
    [
        (BFLOAT16, A100, "this GPU has no products in fp8"),
        ((), H100, "is not the type of the operands"),
        ((*BFLOAT16, "--mesh", "tp4", "--model.ffn", "160"), H100, "layer0.mlp.gate has sizes"),
        ((*BFLOAT16, "--mesh", "tp2"), H100, ""),
        ((*BFLOAT16, "--mesh", "ep2 tp2", "--model.name", "qwen3-moe"), H100, ""),
        ((*BFLOAT16, *NARROW_EXPERTS), H100, "layer0.mlp.experts.gate has sizes"),
        ((*BFLOAT16, *NARROW_EXPERTS, "--precision.fp8_exclude", "experts.*"), H100, ""),
        (BFLOAT16, "another GPU", ""),
    ],
)
def test_what_gpus_do_not_take_is_rejected(words: tuple[str, ...], name: str, message: str) -> None:
    found = [str(fault) for fault in faults_on_gpus(run(*FP8, *words), (name,))]
    assert len(found) == bool(message)
    assert message in "".join(found)
