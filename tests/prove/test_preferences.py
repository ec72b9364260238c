"""The proof of the loss of preference pairs: its plain computation, its rows by definition, and planted faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.prove.faults import FLOAT64, report_of, small_run, unchanged
from weft.data.conversations import ConversationSamples
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.preference import PreferenceLoss
from weft.parallel.context.position_sum import ContextPositionSum
from weft.prove.drawn_pairs import drawn_pairs
from weft.prove.plain_preferences import PlainPreferenceLoss
from weft.prove.raw_batch import batch_of
from weft.prove.subject import Subject
from weft.train.reference_logprobs import References

DPO = f"--loss dpo --data.packing documents {FLOAT64}"


def test_rows_by_definition_are_those_that_ranks_read() -> None:
    samples = drawn_pairs(vocab=64, seq_len=24, global_size=8)
    assert samples.facts()["cut"]  # some pairs are longer than a sequence
    numbers = np.arange(samples.num_samples)
    expected = samples.read(numbers)
    found = batch_of(samples, numbers, later=False)
    for name in ("inputs", "targets", "positions", "documents", "pairs"):
        assert np.array_equal(getattr(found, name).numpy(), getattr(expected, name)), name
    pairs_of_row = found.pairs.sum(1) if found.pairs is not None else None
    assert pairs_of_row is not None
    assert len(pairs_of_row.unique()) > 1


def test_the_plain_loss_of_one_pair() -> None:
    """Two tokens a document, of which the second is the answer."""
    logits = torch.zeros(1, 4, 3, dtype=torch.float64)
    logits[0, 0, 1] = 2.0
    batch = Batch(
        inputs=torch.tensor([[0, 1, 0, 2]]),
        targets=torch.tensor([[1, IGNORE, 2, IGNORE]]),
        positions=torch.tensor([[0, 1, 0, 1]]),
        documents=torch.tensor([[0, 0, 1, 1]]),
        pairs=torch.tensor([[True, False, False, False]]),
        references=torch.tensor([[-0.5, 0.0, -1.5, 0.0]], dtype=torch.float64),
    )
    chosen = 2.0 - math.log(math.exp(2.0) + 2) + 0.5
    rejected = math.log(1 / 3) + 1.5
    right = -math.log(1 / (1 + math.exp(-0.3 * (chosen - rejected))))
    assert float(PlainPreferenceLoss(0.3)(logits, batch)) == pytest.approx(right, rel=1e-14)


@pytest.mark.parametrize("mesh", ["dp2", "cp2 tp2"])
def test_layouts_of_preference_pairs_are_equal(mesh: str) -> None:
    report = report_of(f"--mesh '{mesh}' {DPO}")
    assert report.holds, "\n".join(report.lines())
    assert "the preference pairs are drawn" in report.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--lora.rank 2", "--precision.compute bfloat16", "--mesh pp2"])
def test_options_of_preference_pairs_are_equal(words: str) -> None:
    report = report_of(f"--mesh dp2 --loss dpo --data.packing documents {words}")
    assert report.holds, "\n".join(report.lines())


def test_pairs_of_a_run_that_has_some_are_its_own() -> None:
    subject = Subject.of(small_run(f"--mesh dp2 {DPO}"), steps=1)
    assert isinstance(subject.samples, ConversationSamples)
    assert subject._with_pairs() is subject


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

    def without_beta(self: PreferenceLoss, beta: float) -> None:
        right(self, unchanged(1.0, beta))

    monkeypatch.setattr(PreferenceLoss, "__init__", without_beta)
    report = report_of(f"--mesh dp2 {DPO}", steps=1)
    assert report.first is not None
    assert (report.first.phase, report.first.block) == ("backward", "loss")
