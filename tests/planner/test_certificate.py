"""The typed certificate: healthy layouts, planted faults by operation, block and axis, and what `weft explain` prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import Case, shallow
from weft.cli import main
from weft.comm import ops
from weft.config.schema import PairLossType
from weft.planner.certificate.certificate import Certificate, certify
from weft.planner.certificate.type_mode import TypeMode, ValuesNeededError
from weft.planner.measure.measured_run import MeasuredRun
from weft.start.checked_run import load_checked_run
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.effect import layout_words, write_texts
from weft_selftest.mutants.fault import ModuleFault, Mutant, MutantLayout
from weft_selftest.mutants.plant import planted

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


def test_preference_pairs_with_dropout_have_no_finding() -> None:
    model = ("--model.name", "gpt2", "--model.dropout", "0.1")
    certificate = certificate_of(
        (*model, "--loss", "dpo", "--data.format", "preference", "--mesh", "tp2")
    )
    assert [finding.text for finding in certificate.findings] == []


@pytest.mark.parametrize("name", ["hf:bloom", "hf:qwen3_next", "hf:kimi_linear"])
def test_code_of_transformers_has_no_finding(name: str) -> None:
    """Rows of a mask of ones that are read by their numbers; parts that are written into zeros, and into
    a part of a dim.
    """
    certificate = certificate_of(("--model.name", name, "--mesh", "dp2"))
    assert [finding.text for finding in certificate.findings] == []


def test_rewards_that_are_added_exactly_have_no_finding() -> None:
    words = ("--loss", "dpo", "--dpo.loss_type", "kto", "--data.format", "unpaired")
    certificate = certificate_of((*words, "--mesh", "dp2 tp2 cp2", "--deterministic", "True"))
    assert [finding.text for finding in certificate.findings] == []


@pytest.mark.parametrize("loss", get_args(PairLossType))
def test_losses_of_pairs_have_no_finding(loss: str) -> None:
    words = ("--loss", "dpo", "--dpo.loss_type", loss, "--data.format", "preference")
    certificate = certificate_of((*words, "--mesh", "cp2,tp2"))
    assert [finding.text for finding in certificate.findings] == []
    assert certificate.verdict == "agrees"


def test_dequantized_matrices_have_the_types_of_their_parameters() -> None:
    """Dequantizing writes to them by operations that say nothing of shards."""
    words = ("--lora.rank", "2", "--lora.quantize", "nf4", "--parallel.zero", "3")
    certificate = certificate_of((*words, "--mesh", "dp2,tp2"))
    assert [finding.text for finding in certificate.findings] == []
    assert certificate.verdict == "agrees"


def shared_expert_is_summed_alone(forward: Callable[..., Tensor], module: Any, x: Tensor) -> Tensor:
    """The shared expert is whole on every rank where its region sums parts."""
    return ops.reduce_from_region(forward(module, x), module.gate.region.comm, "tp")


SHARED_EXPERT = Mutant(
    "the_shared_expert_is_whole_inside_the_region",
    "it counts tp times",
    MutantLayout("tp2", family="deepseek"),
    (ModuleFault("layer1.mlp.shared", shared_expert_is_summed_alone, axis="tp"),),
    axes=("tp",),
    blocks=("layer1",),
)
FOUND = {
    "gradients_are_never_reduced": "is partial: it was not summed (axis dp)",
    "gradients_are_averaged_although_the_loss_is_normalised_globally": "divides it by the number",
    "norms_under_sequence_parallelism_are_not_summed_over_tp": "norm.weight is partial: it was",
    "the_bias_of_a_row_linear_is_added_on_every_rank": "addmm adds a tensor to a partial sum",
    "the_gradient_of_the_router_is_not_summed_over_tp": "router.proj.weight is partial",
    "gathered_logits_enter_the_loss_of_a_cut_vocabulary": "replicated tensor counts it once",
    "the_exit_of_a_region_keeps_its_partial_sum": "the output is",
    "zero_shards_of_other_ranks_do_not_count_in_the_norm": "is not counted in the norm (axis dp)",
    "attention_never_leaves_the_rank": "attention of sharded columns calls no other rank",
    SHARED_EXPERT.name: "layer1.mlp.shared.down: add of a partial tensor and a replicated one",
}
"""Mutants that types alone see, and a part of what they say."""
ALSO_FOUND = {
    "gradients_are_summed_twice": "all_reduce runs 2 times on its own result (axis dp)",
    "gradients_are_summed_over_the_wrong_group": "the sum of a replicated tensor counts it once",
    "the_gradient_rule_names_the_wrong_axis": "the sum of a replicated tensor counts it once",
    "gradients_are_not_reduced_over_cp": "is partial: it was not summed (axis cp)",
    "gradients_are_reduced_over_dp_but_not_over_cp": "is partial: it was not summed (axis cp)",
    "gradients_are_reduced_over_cp_but_not_over_dp": "is partial: it was not summed (axis dp)",
    "the_gradient_of_the_embedding_is_not_reduced": "embed.tok.weight is partial",
    "the_gradients_of_one_layer_are_reduced_twice": "the sum of a replicated tensor counts it once",
    "gradients_are_not_set_to_zero_between_steps": "add_ of a partial tensor and a replicated one",
    "the_loss_is_divided_by_this_ranks_own_number_of_targets": "reciprocal of a partial sum",
    "targets_are_counted_over_dp_and_not_over_cp": "clamp of a partial sum",
    "the_number_of_targets_is_averaged_over_ranks": "the avg of a partial sum divides it",
    "replicated_parameters_count_once_a_rank_in_the_norm": "is counted in the norm on every rank",
    "experts_of_other_ranks_do_not_count_in_the_norm": "is not counted in the norm (axis ep)",
    "the_input_gradient_of_a_column_linear_is_not_reduced": "mm of a partial tensor and a sharded",
    "the_input_gradient_of_one_region_is_summed_twice": "all_reduce runs 2 times",
    "the_output_of_one_attention_is_not_summed": "layer1.attn.o: add of a partial tensor and a",
    "row_linears_sum_over_the_wrong_group": "the sum over ranks adds different entries",
    "sequence_shards_are_not_summed": "the output is varying",
    "the_norm_of_one_layer_is_not_summed_over_tp": "layer1.mlp_norm.weight is partial",
    "norms_of_queries_and_keys_are_not_summed_over_tp": "k_norm.weight is partial",
    "the_cut_cross_entropy_forgets_the_other_ranks_exponentials": "loss is varying, not replicated",
    "adapters_of_row_linears_are_added_behind_the_sum": "layer0.attn.o.lora_b: add of a partial",
    "the_gradient_of_a_replicated_adapter_matrix_is_not_summed": "lora_a.weight is partial",
    "the_gradient_of_a_replicated_adapter_product_is_not_summed": "lora_b.weight is partial",
    "a_replicated_norm_is_summed_over_tp_without_sequence_parallelism": "counts it once for each",
    "the_gradient_of_gathered_activations_is_sliced": "a sum over ranks is missing (axis tp)",
    "the_bias_behind_a_scattered_sum_is_not_summed_over_tp": "bias is partial: it was not summed",
    "the_gradient_of_a_latent_projection_is_not_summed_over_tp": "kv_a.weight is partial",
    "every_tensor_rank_counts_its_copy_of_the_loss": "of the same tokens is counted on every rank",
    "tied_embeddings_are_not_summed_across_stages": "are not summed over the stages that hold them",
    "gradients_of_experts_are_summed_over_expert_ranks": "is replicated, and its parameter is sharded",
    "the_balance_loss_counts_on_every_tensor_rank": "is counted on every rank (axis tp)",
    "the_balance_loss_uses_the_counts_of_this_ranks_columns": "is divided by a partial sum (axis cp)",
    "the_load_of_experts_is_that_of_this_rank": "max of a partial sum",
}
"""Likewise; in `make slow`."""
SLOW = [pytest.param(*item, id=item[0], marks=pytest.mark.slow) for item in ALSO_FOUND.items()]
CASES = [*(pytest.param(*item, id=item[0]) for item in FOUND.items()), *SLOW]


@pytest.mark.parametrize(("name", "expected"), CASES)
def test_a_fault_of_composition_is_named(
    name: str, expected: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mutant = {**all_mutants(), SHARED_EXPERT.name: SHARED_EXPERT}[name]
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    words = layout_words(mutant.layout, folder)
    with planted(mutant):
        certificate = certificate_of(words)
    assert certificate.verdict == "mismatch"
    texts = [finding.text for finding in certificate.mismatches]
    assert any(expected in text for text in texts), texts


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


USERS = [
    ("shared_layer.py", "dp2 tp2"),  # several blocks hold one attention
    ("head_bias.py", "dp2"),  # reads the positions of the first sequence
    ("latents.py", "dp2"),  # one tensor of queries, repeated for every sequence
    ("latents.py", "tp2"),  # one head a rank
    ("encoder_decoder.py", "pp2 dp2 tp2"),  # sets columns of a mask; a stage sends two tensors
    ("unet.py", "pp2 dp2"),  # convolutions, the first of which has no input gradient
    ("diffusion.py", "dp2 tp2"),
]


@pytest.mark.parametrize(("name", "mesh"), USERS)
def test_a_model_of_a_user_has_no_finding(name: str, mesh: str) -> None:
    path = Path(__file__).parents[1] / "user_models" / name
    certificate = certificate_of((str(path), "--mesh", mesh))
    assert [finding.text for finding in certificate.findings] == []


@pytest.mark.parametrize(
    ("mesh", "what"),
    [
        ("dp2", "loss.proj: not typed: aten.index of a sharded dim (axis dp)"),
        ("cp2", "layer0.up: not typed: aten.unbind of entries of a sharded dim (axis cp)"),
    ],
)
def test_what_has_no_type_is_the_only_finding(mesh: str, what: str) -> None:
    """Its backward makes zeros of a shape, which do not name what the forward read."""
    path = Path(__file__).parents[1] / "user_models" / "taken_apart.py"
    certificate = certificate_of((str(path), "--mesh", mesh, "--data.seq_len", "16"))
    assert [finding.text for finding in certificate.findings] == [what]
    assert certificate.verdict == "unknown"
