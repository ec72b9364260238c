"""Slurm, three nodes on this machine: the written job survives a lost node, a failed rank and a stop signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.clusters import slurm
from tests.clusters.hosts import Hosts
from tests.clusters.training import (
    ENVIRONMENT,
    FLAGS,
    STEPS,
    cluster_marks,
    last_step,
    losses,
    losses_on_one_host,
    repeated_losses_differ,
    resumed_from,
    wait_until,
)

pytestmark = cluster_marks(slurm.unavailable())


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Hosts(3) as hosts, slurm.SlurmCluster(folder, hosts) as running:
        yield running


def test_a_job_survives_a_rank_a_stop_signal_and_a_node(cluster, tmp_path, record_property):
    out = tmp_path / "a run"
    command = [sys.executable, "-m", "weft", "launch", "slurm", *FLAGS, "--mesh", "dp3"]
    subprocess.run(
        [*command, "--nodes", "3", "--out", str(out), "--save.keep", "100"],
        env={**cluster.environment, **ENVIRONMENT},
        check=True,
    )
    job = "1"
    logs = {"job": out / "job" / f"slurm-{job}.log", "slurmctld": cluster.folder / "slurmctld.log"}
    times = {}

    def wait_for_step(step):
        return wait_until(lambda: last_step(out) >= step, f"step {step}", logs)

    def wait_for_resume(number):
        return wait_until(lambda: len(resumed_from(out)) >= number, f"resume {number}", logs)

    times["first step"] = wait_for_step(1)
    wait_for_step(30)
    os.kill(rank_on(cluster, 2), signal.SIGKILL)
    times["failed rank: resumed after"] = wait_for_resume(1)

    wait_for_step(resumed_from(out)[-1] + 30)
    cluster.command("scancel", "--signal=USR1", job)
    times["signal: resumed after"] = wait_for_resume(2)

    wait_for_step(resumed_from(out)[-1] + 30)
    cluster.kill_node(1)
    wait_until(lambda: cluster.job_state(job) != "RUNNING", "the job is queued again", logs)
    cluster.restart_node(1)
    times["lost node: resumed after"] = wait_for_resume(3)

    wait_until(lambda: cluster.job_state(job) == "COMPLETED", "the job completes", logs)
    for name, seconds in times.items():
        record_property(name, round(seconds, 1))
    record_property("resumed_from", resumed_from(out))
    assert losses(out) == losses_on_one_host(tmp_path, "dp3")
    assert len(losses(out)) == STEPS
    assert not repeated_losses_differ(out)


def rank_on(cluster, node):
    """Process id of the rank on a node."""
    for pid in cluster.processes_on(node):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if b"weft" in words and words[0].endswith(b"python"):
            return pid
    raise AssertionError(f"no rank on node {node}")
