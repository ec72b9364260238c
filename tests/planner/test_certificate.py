"""The typed certificate: healthy layouts, planted faults by operation, block and axis, and what `weft explain` prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import Case, shallow
from weft.cli import main
from weft.commands.console import load_checked_run
from weft.planner.certificate.certificate import Certificate, certify
from weft.planner.certificate.type_mode import TypeMode, ValuesNeededError
from weft.planner.measure.measured_run import MeasuredRun
from weft.prove.mutants.all_mutants import all_mutants
from weft.prove.mutants.effect import layout_words, write_texts
from weft.prove.mutants.plant import planted

LAYOUTS = (
    Case("dp2 tp2"),
    Case("dp2 cp2 tp2", sequence=True),
    Case("cp4", context="allgather"),
    Case("pp2 cp2", context="ulysses", family="gpt2", microbatches=2),
    Case("dp2 tp2", zero=3, family="gpt2", sequence=True),
    Case("dp4", zero=2, recompute="full", grouped=True),
    Case("pp2 tp2", schedule="zero_bubble_h2", recompute="selective"),
    Case("dp2 ep2", family="qwen3-moe", zero=1, microbatches=2),
    Case("ep2 cp2 tp2", family="qwen3-moe", microbatches=1),
    Case("cp2 tp2", family="deepseek", sequence=True, microbatches=1, documents=True),
    Case("pp2 ep2", family="deepseek", schedule="zbv", chunks=2, microbatches=2),
    Case("tp2", family="gemma3", microbatches=1),
    Case("dp2 tp2", family="qwen2", micro_size=2, microbatches=1),
)


def certificate_of(words: tuple[str, ...]) -> Certificate:
    return certify(MeasuredRun.of(load_checked_run(words)))


@pytest.mark.parametrize("case", [shallow(case) for case in LAYOUTS], ids=str)
def test_a_healthy_layout_has_no_finding(case: Case) -> None:
    certificate = certify(MeasuredRun.of(case.run))
    assert [finding.text for finding in certificate.findings] == []
    assert certificate.verdict == "agrees"
    assert all(step.num_operations > 200 for step in certificate.steps)
    assert all(step.num_gradients > 0 for step in certificate.steps)


FOUND = {
    "gradients_are_never_reduced": "is partial: it was not summed (axis dp)",
    "gradients_are_averaged_although_the_loss_is_normalised_globally": "divides it by the number",
    "gradients_are_summed_twice": "counts it once for each rank (axis dp)",
    "norms_under_sequence_parallelism_are_not_summed_over_tp": "norm.weight is partial: it was",
    "gradients_are_not_reduced_over_cp": "is partial: it was not summed (axis cp)",
    "the_output_of_one_attention_is_not_summed": "layer1.attn.o: add of a partial tensor and a",
    "the_gradient_of_the_router_is_not_summed_over_tp": "router.proj.weight is partial",
    "the_balance_loss_counts_on_every_tensor_rank": "is counted on every rank (axis tp)",
    "every_tensor_rank_counts_its_copy_of_the_loss": "the loss of the same tokens is counted on every rank",
    "gathered_logits_enter_the_loss_of_a_cut_vocabulary": "replicated tensor counts it once",
    "the_gradient_of_gathered_activations_is_sliced": "a sum over ranks is missing (axis tp)",
    "the_bias_behind_a_scattered_sum_is_not_summed_over_tp": "bias is partial: it was not summed",
    "the_gradient_of_a_latent_projection_is_not_summed_over_tp": "kv_a.weight is partial",
    "the_exit_of_a_region_keeps_its_partial_sum": "the output is",
}
"""Mutants that types alone see, and a part of what they say."""


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_of_composition_is_named(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mutant = all_mutants()[name]
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    words = layout_words(mutant.layout, folder)
    with planted(mutant):
        certificate = certificate_of(words)
    assert certificate.verdict == "mismatch"
    texts = [finding.text for finding in certificate.mismatches]
    assert any(FOUND[name] in text for text in texts), texts


EXPLAIN = ["explain", "--model.name", "llama3", "--mesh", "tp2", "--model.layers", "2"]


def test_explain_prints_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPLAIN) == 0
    out = capsys.readouterr().out
    assert "types: every tensor of 2 roles of ranks agrees along tp," in out


def test_explain_fails_where_types_do_not_agree(capsys: pytest.CaptureFixture[str]) -> None:
    with planted(all_mutants()["the_output_of_one_attention_is_not_summed"]):
        assert main(EXPLAIN) == 1
    out = capsys.readouterr().out
    assert "types: 1 mismatch in" in out
    assert "layer1.attn.o: add of a partial tensor and a replicated one" in out


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (Tensor.tolist, "a copy to the CPU"),
        (Tensor.item, "item()"),
        (bool, "item()"),
        (Tensor.nonzero, "nonzero"),
        (lambda x: x[x], "index"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_a_step_that_reads_values_is_unknown(read: Callable[[Tensor], object], name: str) -> None:
    with suppress(ValuesNeededError), TypeMode(("dp", "tp")) as mode:
        mode.where = "loss"
        read(torch.empty(1, device="meta") > 0)
    (finding,) = mode.findings.values()
    assert finding.text == (
        f"loss: not typed: {name} reads values, and what is computed from them has no type "
        "(axis dp+tp)"
    )
    assert not finding.is_certain
