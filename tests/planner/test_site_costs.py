"""Predicted costs of training across sites: bytes equal those of a real run, seconds follow from the link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiny_run import TINY
from weft.comm.comm import Comm
from weft.comm.observe import Operation
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.config.run import Run
from weft.data.dataset import open_data
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure
from weft.planner.simulate.site_costs import SiteCosts, site_costs, site_text
from weft.planner.simulate.speeds import Speeds
from weft.testing import run_ranks
from weft.train.build import build_data_loader
from weft.train.build_training import build_step
from weft_plan.simulation.run_simulation import (
    Failures,
    simulate_on,
    simulation_json,
    simulation_lines,
)


def run_of(*words: str) -> Run:
    return load([*TINY, "--site.every", "1", *words], FAMILIES)


class SiteMessages:
    """Sums the bytes that a rank passes to collectives between sites."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def started(self, operation: Operation) -> None:
        if operation.axis == "site":
            self.num_bytes += operation.payload_bytes

    def finished(self, operation: Operation) -> None:
        pass


def counted_bytes(run: Run) -> list[int]:
    """Bytes of one outer step by rank, of a real run."""
    samples = open_data(run.data, run.model)

    def rank(comm: Comm) -> int:
        step = build_step(run, comm)
        loader = build_data_loader(samples, comm, run.batch, seed=1, later=False)
        messages = SiteMessages()
        comm.observers = (messages,)
        step(loader.batches(0), lr=1e-3)
        return messages.num_bytes

    return run_ranks(run.device_mesh, rank)


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_bytes_equal_those_of_a_real_run(wire: str) -> None:
    run = run_of("--mesh", "site2 tp2", "--site.wire", wire)
    roles = measure(MeasuredRun.of(run))
    costs = site_costs(roles, run.site)
    assert costs is not None
    counted = counted_bytes(run)
    assert costs.site_bytes == sum(counted) // 2
    assert costs.rank_bytes == max(counted)
    assert costs.link_bytes == costs.site_bytes


def test_seconds_follow_from_the_link_the_period_and_the_overlap() -> None:
    settings = run_of("--mesh", "site3").site.model_copy(update={"every": 10, "gbit_s": 0.1})
    costs = SiteCosts(settings, num_sites=3, rank_bytes=0, site_bytes=12_500_000)
    assert costs.exchange_s == costs.exposed_s == pytest.approx(2.0)
    assert costs.step_bytes == 2_500_000
    delayed = settings.model_copy(update={"overlap": 4})
    assert replace(costs, settings=delayed).exposed_s is None
    exposed_s = replace(costs, settings=delayed, step_s=0.2).exposed_s
    assert exposed_s == pytest.approx(1.2)
    assert replace(costs, settings=delayed, step_s=1.0).exposed_s == 0
    assert max(map(len, site_text(costs).splitlines())) <= 80


def test_a_simulated_run_waits_for_the_link() -> None:
    """Bytes over the link's speed every H steps, in the mean step and in the seconds of the run."""
    run = run_of("--mesh", "site2", "--site.every", "10", "--site.gbit_s", "0.001")
    failures = Failures(mtbf_hours=1e9, restart_s=1.0, checkpoint_s=1e-9)
    simulation = simulate_on(
        MeasuredRun.of(run),
        Speeds(find_hardware("h100")),
        num_steps=run.steps,
        save_every=run.save.every,
        site=run.site,
        failures=failures,
    )
    assert simulation.sites is not None
    waits_s = simulation.sites.link_bytes / 125_000
    expected = simulation.step.total_s + waits_s / 10
    assert simulation.step_s == pytest.approx(expected)
    assert simulation_json(simulation)["sites"]["mean_step_s"] == pytest.approx(expected)
    assert any("10 steps, float32 on the wire" in line for line in simulation_lines(simulation))
    assert simulation.goodput is not None
    assert simulation.goodput.interval_s == pytest.approx(
        simulation.goodput.interval_steps * expected
    )


def test_one_site_waits_for_no_link() -> None:
    settings = run_of("--mesh", "site1").site
    assert SiteCosts(settings, num_sites=1, rank_bytes=0, site_bytes=0).exposed_s == 0.0
