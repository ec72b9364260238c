"""The proof of local updates: correct ones equal sites on one device, faulty ones do not."""

from __future__ import annotations

import pytest

from weft.commands.prove import prove_config
from weft.config.changed_runs import inside_site
from weft.config.load import load
from weft.config.run import Run
from weft.config.small_runs import reduced
from weft.models import FAMILIES
from weft.parallel.local_updates.outer_step import LocalUpdates
from weft.prove.local_updates import SiteProof
from weft.prove.small_sizes import accepts_sizes
from weft.prove.subject import Subject


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
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_local_updates_hold(wire: str) -> None:
    report = prove_config(run_of("--site.wire", wire, "--site.overlap", "1"), steps=2)
    assert report.holds
    assert [each.dtype for each in report.passes] == ["float32", "float64, local updates"]
    assert "sites train apart" in report.notes[-1]


@pytest.mark.slow
def test_local_updates_of_preference_pairs_hold() -> None:
    report = prove_config(run_of("--loss", "dpo"), steps=2)
    assert report.holds, "\n".join(report.lines())
