"""Proofs of small layouts: healthy ones hold, and planted faults are named by block, axis, phase and relation."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.prove.faults import FLOAT64, report_of, small_run
from weft.checkpoint import saver
from weft.comm.transport import Work
from weft.config.small_runs import is_valid
from weft.models.common.batch import with_later_targets
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.parallel.pipeline.player import Player
from weft.parallel.tensor import vocab
from weft.parallel.zero import grad_norm, grouping
from weft.parallel.zero.param_group import ParamGroup
from weft.prove import bounds, proof
from weft.prove.arithmetic import Perturbation
from weft.prove.failure import is_fault_of_the_layout
from weft.prove.html import page
from weft.prove.proof import reference, reference_bounds
from weft.prove.record import rated_steps
from weft.prove.shrink import smallest_case
from weft.prove.subject import ProofCase, Subject
from weft.train import build, data_loader
from weft.train.step import TrainStep
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.plant import planted

DEEPSEEK = "--model.name deepseek --model.mtp_depth 1"


BFLOAT16 = "--mesh dp2 --precision.compute bfloat16"
DEEPSEEK_DOCUMENTS = f'--mesh "ep2 cp2" {DEEPSEEK} --data.packing documents {FLOAT64}'
SEQUENCE_PARALLEL = '--mesh "dp2 tp2" --parallel.zero 1 --parallel.sequence True'


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (f"{BFLOAT16} --parallel.zero 3", 1),
        (f'--model.name gpt2 --mesh "pp2" --lora.rank 2 {FLOAT64}', 3),
        pytest.param(f"{BFLOAT16} --parallel.zero 3", 3, marks=pytest.mark.slow),
        pytest.param(SEQUENCE_PARALLEL, 3, marks=pytest.mark.slow),
        pytest.param("--mesh dp2 --precision.compute float16", 3, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK_DOCUMENTS, 3, marks=pytest.mark.slow),
    ],
)
def test_a_healthy_layout_is_equal(words, steps):
    report = report_of(words, steps=steps)
    assert report.holds, "\n".join(report.lines())
    assert max(bound.closest for bound in report.bounds) < 0.8


@pytest.mark.parametrize("name", ["lion", "adafactor"])
def test_updates_that_are_made_of_rounding_noise_are_no_difference(name):
    """The gradient of a key bias is zero in exact arithmetic; its sign, and its ratio to its own
    size, are those of rounding errors.
    """
    report = report_of(f"--model.name gpt2 --mesh tp2 --optim.name {name} {FLOAT64}", steps=1)
    assert report.holds, "\n".join(report.lines())


ROUTED_BY_FEW_TOKENS = (
    "--model.name qwen3-moe --mesh tp2 --seed 2 --model.layers 2 --model.dim 16 --model.head_size 4 "
    "--model.expert_ffn 8 --data.seq_len 4 --batch.global_size 1 --batch.micro_size 1 "
    f"--optim.name lion --optim.warmup 2 --optim.clip 0.0 --steps 6 {FLOAT64}"
)


def test_signs_of_gradients_that_are_zero_are_no_difference():
    """Weights of experts that are normalised have no gradient for the logits of the others: rounding
    gives it a sign, and Lion an update of full size, in float64, too.
    """
    report = report_of(ROUTED_BY_FEW_TOKENS, steps=2)
    assert report.holds, "\n".join(report.lines())


def test_differences_near_their_bounds_are_judged_again_with_more_samples(monkeypatch):
    """Two perturbed runs are a small sample, and a fault of the size of the tensor is none."""
    near = "--mesh tp2 --precision.compute bfloat16"
    monkeypatch.setattr(bounds, "FACTOR", 0.001)
    monkeypatch.setattr(bounds, "FLOOR", 0.001)
    monkeypatch.setattr(bounds, "NORM_SHARE", 0.0)
    sampled = []
    more = proof.with_more_samples

    def counted(bounds, subject, *, skipped):
        found = more(bounds, subject, skipped=skipped)
        sampled.append((len(bounds.perturbed), len(found.perturbed)))
        return found

    monkeypatch.setattr(proof, "with_more_samples", counted)
    monkeypatch.setattr(proof, "MOST_EXCESS", 1e3)
    report_of(near, steps=1)
    monkeypatch.setattr(proof, "MOST_EXCESS", 1e-3)
    assert not report_of(near, steps=1).holds
    assert sampled == [(2, 2 + 2 * proof.MORE_SAMPLES)]


SMALL_ADAPTERS = (
    "--model.layers 3 --model.dim 32 --model.ffn 48 --lora.rank 3 --precision.compute bfloat16 "
    "--data.seq_len 16 --batch.global_size 16 --optim.warmup 0 --optim.clip 0.1 --steps 6"
)


@pytest.mark.slow
def test_a_matrix_of_updates_alone_differs_by_their_signs():
    """The second factor of an adapter starts at zero, so it is the signs of its first gradient; where
    rounding decides some of them, the gradient of the first factor moves by more than noise moves it.
    """
    report = report_of(f"{SMALL_ADAPTERS} --mesh 'dp2 tp2' --seed 3632", steps=3)
    assert report.holds, "\n".join(report.lines())


ROUTED = (
    "--model.name deepseek --mesh 'ep2 tp4' --seed 666 --model.balance_rate 0.05 "
    "--model.balance_loss 0.3 --model.mtp_depth 1 --data.seq_len 16 --data.packing documents "
    "--optim.name adafactor --optim.warmup 0 --precision.compute float16 --steps 6"
)


@pytest.mark.slow
def test_rounding_inside_blocks_is_no_difference():
    """The gradient of a router multiplies outputs of experts, which tensor parallelism sums from
    rounded parts; noise between blocks alone moves it eight times less.
    """
    report = report_of(ROUTED, steps=2)
    assert report.holds, "\n".join(report.lines())


def test_noise_reaches_the_modules_inside_blocks():
    subject = Subject.of(small_run("--mesh dp2"), steps=1)
    outputs = []
    for is_inside in (False, True):
        perturbation = Perturbation(noise_seed=2, is_inside_blocks=is_inside)
        trace = reference(subject, perturbation=perturbation).run_all(1)
        outputs.append(trace.values[1, "forward", "layer0.output"])
    plain = reference(subject).run_all(1).values[1, "forward", "layer0.output"]
    between, inside = ((each - plain).abs().max() for each in outputs)
    assert between < inside < 1e-5 * plain.abs().max()


def test_signs_are_drawn_where_rounding_decides_them_and_a_matrix_starts_at_zero():
    words = "--lora.rank 2 --precision.compute bfloat16"
    run = small_run(words)
    subject = Subject.of(run, steps=2)
    found = reference_bounds(subject, skipped=frozenset())
    drawn = found.perturbed[-1]
    num_flipped = 0
    for name in ("layer0.attn.q.lora_b.weight", "layer0.attn.v.lora_b.weight"):
        is_free = found.small_gradient(name, 1)
        updates = []
        for trace in (found.plain, drawn):
            updates.append(trace.values[1, "update", name])
        signs = [update.sign() for update in updates]
        differs = signs[0] != signs[1]
        assert not bool(differs[~is_free].any())
        num_flipped += int(differs.sum())
    assert num_flipped > 0
    assert len(found.perturbed) == 1 + len(subject.perturbations())
    plain = Subject.of(small_run("--precision.compute bfloat16"), steps=1)
    count = len(reference_bounds(plain, skipped=frozenset()).perturbed)
    assert count == len(plain.perturbations())


def test_a_tied_parameter_is_updated_as_its_owner_is_on_every_stage():
    """Multi-token prediction has the embedding under a name of its own on the last stage."""
    words = f"{DEEPSEEK} --mesh pp2 --optim.name muon {FLOAT64}"
    report = report_of(words, steps=2)
    assert report.holds, "\n".join(report.lines())


@pytest.mark.parametrize("name", ["lion", pytest.param("muon", marks=pytest.mark.slow)])
def test_updates_with_jumps_are_compared_in_float64(name):
    report = report_of(f"--mesh dp2 --optim.name {name}", steps=1)
    assert report.holds, "\n".join(report.lines())
    (only,) = report.passes
    assert only.dtype == "float64"
    assert "compared in float64 alone" in report.notes[0]


def test_stored_tensors_are_those_that_training_held():
    fault = all_mutants()["rows_are_turned_by_the_save_and_back_by_the_load"]
    with planted(fault):
        report = report_of(f"--mesh dp2 {FLOAT64}", steps=2)
    assert report.first is not None
    assert report.first.phase == "checkpoint"
    assert report.first.tensor == "embed.tok.weight as stored"


@pytest.mark.slow
def test_parameters_that_are_never_gathered_again_are_found(monkeypatch):
    """The 16-bit copies keep their initial values; a proof in float64 alone does not see it."""
    right = TrainStep.update

    def without_refresh(self: TrainStep, lr: float) -> None:
        self.grads.after_optimizer_step = lambda: None  # type: ignore[method-assign]
        right(self, lr)

    monkeypatch.setattr(TrainStep, "update", without_refresh)
    first = report_of(BFLOAT16).first
    assert first is not None
    assert (first.step, first.phase) == (2, "forward")
    assert first.tensor.endswith(" as used")
    assert "stale" in first.relation


def test_float16_gradients_that_keep_the_loss_scale_are_found(monkeypatch):
    """AdamW hides the factor from the parameters."""
    right = grad_norm.clip

    def clip(reducer, norm, *, most, scale=1.0):
        right(reducer, norm, most=most, scale=1.0)

    monkeypatch.setattr(grad_norm, "clip", clip)
    first = report_of("--mesh dp2 --precision.compute float16", steps=1).first
    assert first is not None
    assert (first.step, first.phase) == (1, "clip")
    assert first.relation == "65536 times the right values"


@pytest.mark.parametrize(
    ("key", "phase", "tensor"),
    [("params", "clip", "clipped gradient"), ("reduce", "reduce", "gradient")],
)
def test_a_number_type_that_is_not_that_of_the_run_is_found(monkeypatch, key, phase, tensor):
    """Rounding bounds of 16 bits are wider than what it changes."""
    right = grouping.sharding_policy

    def wrong(plan):
        policy = right(plan)
        return replace(policy, **{key: policy.compute})

    monkeypatch.setattr(grouping, "sharding_policy", wrong)
    first = report_of("--mesh dp1 --precision.compute bfloat16", steps=1).first
    assert first is not None
    assert first.step == 1
    assert first.phase == phase
    assert first.block == "head"
    assert first.tensor == f"head.proj.weight {tensor}"
    assert first.relation == "in bfloat16 in place of float32"


def test_a_wrong_evaluation_is_found(monkeypatch):
    """Only the evaluation after the last step shows it: nothing that is trained depends on it."""
    monkeypatch.setattr(ForwardPlayer, "loss", lambda self, batches: torch.ones(()).double())
    report = report_of(f"--mesh dp2 {FLOAT64}", steps=1)
    first = report.first
    assert first is not None
    assert first.step == 1
    assert first.phase == "evaluation"
    assert first.tensor == "evaluation loss"
    assert len(report.differences) == 1


def test_a_save_that_changes_what_is_trained_is_found(monkeypatch):
    """The checkpoint is right; training that goes on after it is not."""
    right = saver.snapshot_of

    def snapshot_of(state):
        found = right(state)
        for param in state.grads.sharded_params.values():
            param.detach().mul_(1.01)
        return found

    monkeypatch.setattr(saver, "snapshot_of", snapshot_of)
    first = report_of(f"--mesh dp1 {FLOAT64}").first
    assert first is not None
    assert first.step == 2
    assert first.tensor == "embed.tok.weight as used"


def test_an_error_of_a_restore_is_a_difference(monkeypatch):
    """What a layout raises ends no proof: it is reported with its phase, parameter and axis."""

    def restore(self, checkpoint, **options):
        raise KeyError("optim/exp_avg/layer1.mlp.up.weight")

    monkeypatch.setattr(TrainStep, "restore", restore)
    report = report_of(f"--mesh dp2 {FLOAT64}")
    assert not report.holds
    assert report.error == "KeyError: 'optim/exp_avg/layer1.mlp.up.weight'"
    first = report.first
    assert first is not None
    assert first.phase == "checkpoint"
    assert first.step == 2
    assert first.block == "layer1"
    assert first.axis == "dp"
    assert first.parameter == "layer1.mlp.up.weight"
    assert json.loads(report.to_json())["first"]["block"] == "layer1"
    assert "  in checkpoint of step 2: layer1.mlp.up.weight" in report.lines()


def test_what_differs_before_a_checkpoint_is_refused_is_named_first():
    """Replicas that have drifted apart do not have the digests that they were saved with."""
    with planted(all_mutants()["gradients_are_never_reduced"]):
        report = report_of(f"--mesh dp2 {FLOAT64}", steps=2)
    assert report.first is not None
    assert report.first.phase == "reduce"
    assert report.axis == "dp"
    assert not report.error
    assert any("what was loaded differs" in note for note in report.notes)


def test_a_shortage_of_the_machine_is_not_a_fault_of_the_layout():
    full_disk = OSError(errno.ENOSPC, "no space left on device")
    assert not is_fault_of_the_layout(full_disk, [])
    assert not is_fault_of_the_layout(MemoryError(), [])
    assert is_fault_of_the_layout(KeyError("layer1"), [])


def test_an_error_in_a_block_names_the_block(monkeypatch):
    """The message does not: it is the block that ran."""

    def forward(self, x, *args):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(nn.RMSNorm, "forward", forward)
    first = report_of(f"--mesh pp2 {FLOAT64}", steps=1).first
    assert first is not None
    assert first.phase == "forward"
    assert first.step == 1
    assert first.block == "layer0"
    assert first.axis == "pp"
    assert first.ranks == (0,)


def test_later_targets_made_after_the_split_of_sequences_are_found(monkeypatch):
    """Multi-token prediction on cp: the last token of each chunk gets the wrong next one."""

    def micro_batches(self, chosen):
        local = data_loader.layout_of(
            chosen, index=self.index, degree=self.degree, micro_size=self.micro_size
        )
        sequences = data_loader.whole_batch(self.samples, local, later=False)
        shard = sequences.columns(index=self.context_index, degree=self.context_degree)
        starts = range(0, local.size, self.micro_size)
        parts = []
        for start in starts:
            rows = slice(start, start + self.micro_size)
            parts.append(shard.rows(rows))
        return [with_later_targets(part) for part in parts]

    monkeypatch.setattr(data_loader.DataLoader, "micro_batches", micro_batches)
    first = report_of(f"--mesh cp2 {DEEPSEEK} {FLOAT64}", steps=1).first
    assert first is not None
    assert (first.step, first.phase) == (1, "batch")
    assert first.tensor in ("next_inputs", "later_targets")
    assert first.axis == "cp"


def test_a_missing_reduction_is_named_by_axis_and_collective(monkeypatch):
    def only_tp(self, unsharded):
        axes = tuple(axis for axis in self.axes if axis != "dp")
        return self.comm.start_all_reduce_(unsharded, axes) if axes else Work.done(unsharded)

    monkeypatch.setattr(ParamGroup, "_start_collective", only_tp)
    first = report_of(f'--mesh "dp2 tp2" {FLOAT64}', steps=1).first
    assert first is not None
    assert first.block == "head"
    assert first.parameter == "head.proj.weight"
    assert first.phase == "reduce"
    assert first.axis == "dp"
    assert first.relation.startswith("not summed over dp")
    assert first.ranks == (0, 1, 2, 3)


def test_moments_that_are_not_restored_are_found_in_the_checkpoint(monkeypatch):
    right = TrainStep.restore

    def restore(self, checkpoint, **options):
        right(self, checkpoint, **options)
        self.optimizer.state["head.norm.weight"]["exp_avg"].zero_()

    monkeypatch.setattr(TrainStep, "restore", restore)
    first = report_of(f"--mesh dp2 {FLOAT64}").first
    assert first is not None
    assert first.step == 2
    assert first.phase == "checkpoint"
    assert first.block == "head"
    assert first.tensor == "head.norm.weight exp_avg"
    assert first.relation == "zero"


def test_data_that_starts_again_after_a_resume_is_found(monkeypatch):
    """The batches of a resumed run are those of its first steps."""
    right = data_loader.places_of_step
    monkeypatch.setattr(data_loader, "places_of_step", lambda step, size: right(step % 2, size))
    first = report_of(f"--mesh dp2 {FLOAT64}").first
    assert first is not None
    assert first.step == 3
    assert first.phase == "batch"
    assert first.tensor == "inputs"


def test_a_wrong_learning_rate_is_named_by_the_change(monkeypatch):
    right = TrainStep.update
    monkeypatch.setattr(TrainStep, "update", lambda self, lr: right(self, 2 * lr))
    first = report_of(f"--mesh dp2 {FLOAT64}", steps=1).first
    assert first is not None
    assert first.phase == "update"
    assert first.relation == "updated by 2 times the right change"


def test_a_wrong_rate_of_a_step_that_is_not_trained_is_found(monkeypatch):
    right = build.learning_rate
    monkeypatch.setattr(build, "learning_rate", lambda step, **_: right(min(step, 3), **_))
    first = report_of(f"--mesh dp1 --optim.decay cosine {FLOAT64}", steps=1).first
    assert first is not None
    assert first.tensor == "learning rate"
    assert first.step == 5


def test_losses_that_are_added_in_16_bits_are_found(monkeypatch):
    """The bounds of 16 bits are wider than what it changes."""
    right = Player.play

    def play(self, *args, **named):
        played = right(self, *args, **named)
        is_exact = self.model.plan.compute == "float64"
        return played if is_exact else replace(played, loss=played.loss.bfloat16().double())

    monkeypatch.setattr(Player, "play", play)
    first = report_of("--mesh dp1 --precision.compute bfloat16", steps=1).first
    assert first is not None
    assert first.phase == "loss"
    assert first.relation.startswith("not the mean of the ranks' losses")


def test_a_loss_of_16_bits_is_found(monkeypatch):
    right = vocab.vocab_token_losses

    def losses(logits, *args, **named):
        return right(logits, *args, **named).to(logits.dtype)

    monkeypatch.setattr(vocab, "vocab_token_losses", losses)
    first = report_of("--mesh tp2 --precision.compute bfloat16", steps=1).first
    assert first is not None
    assert first.block == "loss"
    assert first.relation == "in bfloat16 in place of float32"


def test_rates_of_a_long_schedule_are_compared_at_some_steps_and_the_last():
    assert rated_steps(6) == (1, 2, 3, 4, 5, 6)
    steps = rated_steps(10_000)
    assert len(steps) == 64
    assert steps[-1] == 10_000


def test_a_case_is_reduced_to_valid_other_cases_of_the_same_steps():
    case = ProofCase(small_run('--mesh "dp2 tp2" --parallel.zero 1'), 2)
    meshes = set()
    for reduction in case.reductions():
        for smaller in reduction(case):
            assert smaller != case
            assert smaller.steps == case.steps
            assert is_valid(smaller.run)
            meshes.add(smaller.mesh.text)
    assert meshes == {"dp2 tp2", "dp2", "tp2"}


def test_a_case_without_smaller_ones_of_an_axis_has_no_cases():
    alone = ProofCase(small_run("--mesh tp2"), 1)
    fewer_ranks = next(alone.reductions())
    (one_rank,) = fewer_ranks(alone)
    assert one_rank.mesh.size == 1
    assert list(fewer_ranks(one_rank)) == []


@pytest.mark.slow
def test_the_smallest_case_is_a_command(monkeypatch):
    """A fault of tp in a run with zero, recompute and dp: one axis is left, without options."""
    right = grad_norm._is_first_replica
    monkeypatch.setattr(
        grad_norm,
        "_is_first_replica",
        lambda shard, comm, axes: right(shard, comm, axes) or comm.index("tp") > 0,
    )
    words = f'--mesh "dp2 tp2" --parallel.zero 1 --parallel.recompute full {FLOAT64}'
    report = report_of(words)
    smallest = smallest_case(ProofCase(small_run(words), report.steps), report, seconds=30)
    assert smallest.layout == "tp2"
    assert smallest.steps == 1
    assert smallest.command.startswith("weft prove --full --first 1 --mesh tp2 ")
    first = report.with_smallest(smallest).first
    assert first is not None
    assert (first.phase, first.axis) == ("norm", "tp")


def test_the_report_is_text_json_and_a_page():
    report = replace(report_of(f"--mesh dp2 {FLOAT64}", steps=1), command="weft prove --mesh dp2")
    for line in report.lines():
        assert len(line) <= 80
    assert "bound 1.0e-09" in "\n".join(report.lines())
    data = json.loads(report.to_json())
    assert data["verdict"] == "equal"
    assert data["first"] is None
    html = page(report)
    assert "equal" in html
    assert "<script" not in html
    assert "://" not in html


def test_the_reference_masks_targets_that_feeding_masks():
    """Unequal numbers of targets on every rank are part of every proof of token data."""
    subject = Subject.of(small_run("--mesh dp2"), steps=1)
    samples = subject.samples
    first = samples.at(np.arange(8), seed=1)
    targets = samples.read(first).targets
    counts = (targets >= 0).sum(1)
    assert len(set(counts.tolist())) > 1
