"""The proof of the loss of preference pairs: its plain computation, its rows by definition, and planted faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.prove.faults import FLOAT64, report_of, small_run, unchanged
from weft.config.schema import DpoConfig, LossName, PairLossType
from weft.data.conversations import ConversationSamples
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.pair_losses import AnswerSums
from weft.models.common.preference import PreferenceLoss
from weft.parallel.context.position_sum import ContextPositionSum
from weft.prove.drawn_pairs import drawn_records
from weft.prove.plain_preferences import PlainPreferenceLoss, PlainRewardLoss, ReferenceModel
from weft.prove.raw_batch import batch_of
from weft.prove.subject import Subject
from weft.train.kl_estimate import KlEstimate
from weft.train.reference_logprobs import References

NORMED = Path(__file__).parents[1] / "user_models" / "normed_text.py"
DPO = f"--loss dpo --data.packing documents {FLOAT64}"
OTHER_LOSSES = {
    "sigmoid": "--dpo.label_smoothing 0.2",
    "hinge": "",
    "ipo": "",
    "simpo": "--dpo.beta 2 --dpo.label_smoothing 0.1",
    "orpo": "",
    "kto": "--dpo.desirable_weight 1.5 --optim.lr 0.01 --optim.warmup 0",
}


@pytest.mark.parametrize(("loss", "has_labels"), [("dpo", False), ("reward", False), ("dpo", True)])
def test_rows_by_definition_are_those_that_ranks_read(loss: LossName, has_labels: bool) -> None:
    samples = drawn_records(
        vocab=64, seq_len=24, global_size=8, loss=loss, num_classes=0, has_labels=has_labels
    )
    assert samples.facts()["cut"]  # some pairs are longer than a sequence
    numbers = np.arange(samples.num_samples)
    expected = samples.read(numbers)
    found = batch_of(samples, numbers, later=False)
    for name in ("inputs", "targets", "positions", "documents", "pairs"):
        assert np.array_equal(getattr(found, name).numpy(), getattr(expected, name)), name
    pairs_of_row = found.pairs.sum(1) if found.pairs is not None else None
    assert pairs_of_row is not None
    assert len(pairs_of_row.unique()) > 1


def test_rows_of_labelled_texts_are_those_that_ranks_read() -> None:
    samples = drawn_records(vocab=64, seq_len=24, global_size=8, loss="classify", num_classes=3)
    numbers = np.arange(samples.num_samples)
    expected = samples.read(numbers)
    found = batch_of(samples, numbers, later=False)
    for name in ("inputs", "targets", "positions", "documents"):
        assert np.array_equal(getattr(found, name).numpy(), getattr(expected, name)), name
    assert set(found.targets.unique().tolist()) == {IGNORE, 0, 1, 2}
    assert found.documents is not None
    is_last = found.documents != found.documents.roll(-1, 1)
    is_target = found.targets != IGNORE
    assert bool(is_target.any())
    assert not bool((is_target[:, :-1] & ~is_last[:, :-1]).any())


def test_the_plain_loss_of_two_rewards() -> None:
    """The scores of the last tokens count, 0.5 and -0.25."""
    batch = Batch(
        inputs=torch.tensor([[0, 1, 2, 0, 2]]),
        targets=torch.tensor([[IGNORE, IGNORE, 0, IGNORE, 0]]),
        positions=torch.tensor([[0, 1, 2, 0, 1]]),
        documents=torch.tensor([[0, 0, 0, 1, 1]]),
        pairs=torch.tensor([[False, False, True, False, False]]),
    )
    scores = torch.tensor([[[3.0], [9.0], [0.5], [7.0], [-0.25]]], dtype=torch.float64)
    right = -math.log(logistic(0.75))
    assert float(PlainRewardLoss()(scores, batch)) == pytest.approx(right, rel=1e-14)


@pytest.mark.parametrize(
    "words",
    ["--loss reward --mesh 'cp2 tp2'", "--loss classify --data.classes a b --mesh 'pp2 dp2'"],
)
def test_layouts_of_scored_texts_are_equal(words: str) -> None:
    report = report_of(f"{words} {FLOAT64}")
    assert report.holds, "\n".join(report.lines())
    assert "are drawn" in report.notes[0]


A = 2.0 - math.log(math.exp(2.0) + 2)
B = math.log(1 / 3)
"""Log-probabilities of a token with logit 2 beside two of logit 0, and of one of three equal ones."""


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(p: float) -> float:
    return p / (1 - p)


@pytest.mark.parametrize(
    ("dpo", "right"),
    [
        (DpoConfig(beta=0.3), -math.log(logistic(0.3 * (A + B + 1 - (B + 1.5))))),
        (
            DpoConfig(beta=0.3, label_smoothing=0.1),
            -0.9 * math.log(logistic(0.3 * (A - 0.5))) - 0.1 * math.log(logistic(0.3 * (0.5 - A))),
        ),
        (DpoConfig(loss_type="hinge", beta=0.3), 1 - 0.3 * (A - 0.5)),
        (DpoConfig(loss_type="hinge", beta=30.0), 1 - 30 * (A - 0.5)),
        (DpoConfig(loss_type="ipo", beta=0.3), ((A + B + 1) / 2 - (B + 1.5) - 1 / 0.6) ** 2),
        (
            DpoConfig(loss_type="simpo", beta=2.0, gamma=0.7),
            -math.log(logistic(2 * ((A + B) / 2 - B) - 0.7)),
        ),
        (
            DpoConfig(loss_type="orpo", beta=0.3),
            -(A + B) / 2
            - 0.3 * math.log(logistic(math.log(odds(math.exp((A + B) / 2)) / odds(1 / 3)))),
        ),
    ],
    ids=str,
)
def test_the_plain_loss_of_one_pair(dpo: DpoConfig, right: float) -> None:
    """The chosen answer has two tokens behind a prompt of one, the rejected one has one."""
    logits = torch.zeros(1, 5, 3, dtype=torch.float64)
    logits[0, 0, 1] = 2.0
    batch = Batch(
        inputs=torch.tensor([[0, 1, 2, 0, 2]]),
        targets=torch.tensor([[1, 2, IGNORE, 2, IGNORE]]),
        positions=torch.tensor([[0, 1, 2, 0, 1]]),
        documents=torch.tensor([[0, 0, 0, 1, 1]]),
        pairs=torch.tensor([[True, False, False, False, False]]),
    )
    if dpo.has_reference:
        references = torch.tensor([[-0.5, -0.5, 0.0, -1.5, 0.0]], dtype=torch.float64)
        batch = replace(batch, references=references)
    assert float(PlainPreferenceLoss(dpo)(logits, batch)) == pytest.approx(right, rel=1e-14)


@pytest.mark.parametrize("mesh", ["dp2", "cp2 tp2"])
def test_layouts_of_preference_pairs_are_equal(mesh: str) -> None:
    report = report_of(f"--mesh '{mesh}' {DPO}")
    assert report.holds, "\n".join(report.lines())
    assert "the preference pairs are drawn" in report.notes[0]


def of_loss(name: str) -> str:
    """Flags of a loss of pairs."""
    return f"{DPO} --dpo.loss_type {name} {OTHER_LOSSES[name]}"


@pytest.mark.parametrize("mesh", ["dp2 cp2", "tp2", "pp2"])
@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_layouts_of_other_losses_are_equal(loss: str, mesh: str) -> None:
    report = report_of(f"--mesh '{mesh}' {of_loss(loss)}")
    assert report.holds, "\n".join(report.lines())


@pytest.mark.parametrize("loss", ["ipo", "kto"])
def test_models_with_batch_norm_are_equal(loss: str) -> None:
    """Before, the copy that a model is compared with had statistics of each batch and not those that
    the model began with, and KTO ended the evaluation mode of the one-device reference.
    """
    sizes = "--batch.global_size 4 --batch.micro_size 2"
    report = report_of(f"--model.name {NORMED} --mesh dp2 {of_loss(loss)} {sizes}", steps=2)
    assert report.holds, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("loss", OTHER_LOSSES)
@pytest.mark.parametrize(
    "words",
    [
        "--mesh dp2 --parallel.zero 3 --lora.rank 2",
        "--mesh cp2 --precision.compute bfloat16",
        "--mesh dp2,ep2 --model.name deepseek --model.balance_loss 0 --model.mtp_depth 0",
    ],
)
def test_options_of_other_losses_are_equal(loss: str, words: str) -> None:
    packed = "--loss dpo --data.packing documents"
    report = report_of(f"{packed} --dpo.loss_type {loss} {OTHER_LOSSES[loss]} {words}")
    assert report.holds, "\n".join(report.lines())


@pytest.mark.parametrize(
    "words", ["simpo --dpo.beta 100", "sigmoid --dpo.label_smoothing 0.2 --dpo.beta 300"]
)
def test_rounding_of_large_margins_is_no_difference(words: str) -> None:
    """In float32: margins of hundreds of nats saturate, and a rounding counts beta times."""
    packed = "--loss dpo --data.packing documents"
    report = report_of(f"--mesh dp2 {packed} --dpo.loss_type {words}")
    assert report.holds, "\n".join(report.lines())


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_model_evaluate_none(
    loss: PairLossType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(*_: object, **__: object) -> object:
        raise AssertionError("log-probabilities under a reference model")

    monkeypatch.setattr(References, "add_to", evaluated)
    monkeypatch.setattr(ReferenceModel, "add_to", evaluated)
    report = report_of(f"--mesh dp2 {of_loss(loss)}", steps=2)
    assert report.holds, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--lora.rank 2", "--precision.compute bfloat16", "--mesh pp2"])
def test_options_of_preference_pairs_are_equal(words: str) -> None:
    report = report_of(f"--mesh dp2 --loss dpo --data.packing documents {words}")
    assert report.holds, "\n".join(report.lines())


def test_pairs_of_a_run_that_has_some_are_its_own() -> None:
    subject = Subject.of(small_run(f"--mesh dp2 {DPO}"), steps=1)
    assert isinstance(subject.samples, ConversationSamples)
    assert subject._with_records() is subject


def test_sums_of_documents_that_context_ranks_do_not_share_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own_sums(self: ContextPositionSum, sums: Tensor) -> Tensor:
        del self
        return sums

    monkeypatch.setattr(ContextPositionSum, "forward", own_sums)
    report = report_of(f"--mesh cp2 {DPO}", steps=1)
    assert report.first is not None
    assert (report.first.phase, report.first.axis) == ("loss", "cp")


def test_references_of_other_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = References.add_to

    def add_shifted(self: References, samples: ConversationSamples, *, name: str) -> object:
        found = right(self, samples, name=name)
        return type(found)(found.samples, np.roll(found.logprobs, 1, axis=0))

    monkeypatch.setattr(References, "add_to", add_shifted)
    report = report_of(f"--mesh dp2 {DPO}", steps=1)
    assert report.first is not None
    assert (report.first.phase, report.first.tensor) == ("batch", "references")


def test_a_margin_without_beta_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no effect on the loss of the first step, where every margin is zero."""
    right = PreferenceLoss.__init__

    def without_beta(self: PreferenceLoss, dpo: DpoConfig) -> None:
        right(self, dpo.model_copy(update={"beta": unchanged(1.0)}))

    monkeypatch.setattr(PreferenceLoss, "__init__", without_beta)
    report = report_of(f"--mesh dp2 {DPO}", steps=1)
    assert report.first is not None
    assert (report.first.phase, report.first.block) == ("backward", "loss")


@pytest.mark.parametrize(
    ("loss", "phase"), [("ipo", "backward"), ("simpo", "loss"), ("orpo", "loss"), ("hinge", "")]
)
def test_means_over_this_ranks_targets_are_found(
    loss: PairLossType, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank divides the sum over the whole answer by the number of targets that it holds. In the
    first step the sums of ipo are zero, and their gradients are not; a hinge has no means.
    """
    right = ContextPositionSum.forward

    def own_counts(self: ContextPositionSum, sums: Tensor) -> Tensor:
        gains, _, marks = right(self, sums).unbind(0)
        return torch.stack((gains, sums[1], marks))

    monkeypatch.setattr(ContextPositionSum, "forward", own_counts)
    report = report_of(f"--mesh cp2 {of_loss(loss)}", steps=1)
    found = ("", "")
    if report.first is not None:
        found = (report.first.phase, report.first.axis)
    assert found == (phase, "cp" if phase else "")
    assert report.holds == (not phase)


def test_a_z0_of_the_answers_of_one_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step the model is the reference, so it is 0 there."""
    right = KlEstimate.update

    def of_own_answers(self: KlEstimate, batches: Sequence[Batch]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.comm, "sum_world", lambda row: row)
            right(self, batches)

    monkeypatch.setattr(KlEstimate, "update", of_own_answers)
    report = report_of(f"--mesh dp2 {of_loss('kto')}", steps=2)
    assert report.first is not None
    assert (report.first.phase, report.first.block, report.first.step) == ("loss", "loss", 2)


def test_means_over_tokens_of_the_prompt_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_prompt(sums: AnswerSums) -> Tensor:
        return sums.logprobs / (sums.num_targets + 2)

    monkeypatch.setattr(AnswerSums, "means", property(with_prompt))
    report = report_of(f"--mesh dp2 {of_loss('simpo')}", steps=1)
    assert report.first is not None
    assert (report.first.phase, report.first.block) == ("loss", "loss")
