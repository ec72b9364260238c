"""Slurm with a spare node: the node of the batch script is lost, and the job is queued again and goes on."""

from __future__ import annotations

import subprocess
import sys

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
    wait_until,
)

pytestmark = cluster_marks(slurm.unavailable())


def test_a_job_whose_first_node_is_lost_is_queued_again(tmp_path, record_property):
    out = tmp_path / "run"
    folder = tmp_path / "slurm"
    folder.mkdir()
    logs = {"job": out / "job" / "slurm-1.log", "slurmctld": folder / "slurmctld.log"}
    words = [sys.executable, "-m", "weft", "launch", "slurm", *FLAGS[:-2], "--mesh", "dp2"]
    words += ["--nodes", "2", "--spare_nodes", "1", "--out", str(out), "--save.every", "10"]
    with Hosts(3) as hosts, slurm.SlurmCluster(folder, hosts) as cluster:
        subprocess.run(words, env={**cluster.environment, **ENVIRONMENT}, check=True)
        wait_until(lambda: last_step(out) >= 20, "step 20", logs)
        cluster.kill_node(0)
        queued_s = wait_until(lambda: cluster.job_state("1") == "PENDING", "queued again", logs)
        record_property("queued_after_s", round(queued_s, 1))
        cluster.restart_node(0)
        wait_until(lambda: cluster.job_state("1") == "COMPLETED", "the job completes", logs)
    assert losses(out) == losses_on_one_host(tmp_path, "dp2")
    assert len(losses(out)) == STEPS
