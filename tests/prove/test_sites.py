"""The proof of local updates: correct ones equal sites on one device, faulty ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from weft.config.changed_runs import inside_site
from weft.config.load import load
from weft.config.run import Run
from weft.config.small_runs import reduced
from weft.models import FAMILIES
from weft.parallel.local_updates.outer_step import LocalUpdates
from weft.prove.local_updates import SiteProof
from weft.prove.small_sizes import accepts_sizes
from weft.prove.subject import Subject
from weft.start.prove_run import prove_config
from weft.train.step import TrainStep
from weft_selftest.mutants.plant import replaced


def run_of(*words: str) -> Run:
    return load(["--mesh", "site2 dp2", *words], FAMILIES)


def site_proof(run: Run) -> SiteProof:
    small = reduced(run, accepts_sizes)
    return SiteProof.of(Subject.of_recorded(small, steps=2))


def test_one_site_is_the_layout_without_the_axis_on_its_part_of_the_batch() -> None:
    inside = inside_site(run_of("--site.every", "7"))
    assert inside.mesh == "dp2"
    assert inside.batch.global_size == 8
    assert inside.site.every == 20


@pytest.mark.slow
def test_an_outer_step_without_momentum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LocalUpdates._apply

    def forget_momentum(self: LocalUpdates, on_exchange: object) -> float:
        self.outer.momentum.zero_()
        return right(self, on_exchange)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalUpdates, "_apply", forget_momentum)
    found = site_proof(run_of("--site.wire", "int8", "--site.overlap", "1")).compare()
    assert {difference.axis for difference in found.differences} == {"site"}


@pytest.mark.slow
def test_a_weight_of_a_site_in_the_average_is_found() -> None:
    """The first of two sites counts three times as much as the other."""

    def weighted(right: object, self: LocalUpdates, exchange: Any) -> Tensor:
        del right
        if exchange.mean is None:
            first, second = exchange.work.wait().view(2, -1).unbind()
            exchange.mean = 0.75 * self.wire.decode(first) + 0.25 * self.wire.decode(second)
        mean: Tensor = exchange.mean
        return mean

    with replaced("weft.parallel.local_updates.outer_step:LocalUpdates._mean", weighted):
        found = site_proof(run_of()).compare()
    assert found.differences[0].tensor.startswith("model/")
    assert {difference.axis for difference in found.differences} == {"site"}


@pytest.mark.slow
def test_a_momentum_that_a_resume_loses_is_found() -> None:
    def without_momentum(right: Callable[..., None], self: TrainStep, num_done: int) -> None:
        right(self, num_done)
        if self.local_updates is not None:
            self.local_updates.outer.momentum.zero_()

    with replaced("weft.train.step:TrainStep.set_position", without_momentum):
        found = site_proof(run_of()).compare()
    names = {difference.tensor for difference in found.differences}
    assert any(name.startswith("site/momentum/") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_local_updates_hold(wire: str) -> None:
    report = prove_config(run_of("--site.wire", wire, "--site.overlap", "1"), steps=2)
    assert report.holds
    assert [each.dtype for each in report.passes] == ["float32", "float64, local updates"]
    assert any("sites train apart" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_local_updates_of_preference_pairs_hold(loss_type: str) -> None:
    report = prove_config(run_of("--loss", "dpo", "--dpo.loss_type", loss_type), steps=2)
    assert report.holds, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["0", "0.1"])
def test_local_updates_of_gpt2_hold(dropout: str) -> None:
    """Its key biases have gradients of rounding alone; what it drops depends on the place of a
    sequence in the batch of all sites.
    """
    run = run_of("--model.name", "gpt2", "--model.dropout", dropout)
    assert not site_proof(run).compare().differences
