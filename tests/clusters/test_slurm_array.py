"""Slurm on this machine: the runs of a sweep are tasks of one job array, and the same command compares them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.clusters import slurm
from tests.clusters.hosts import Hosts
from tests.clusters.training import ENVIRONMENT, cluster_marks, last_step, losses, wait_until
from tests.tiny_run import MODEL, SEQUENCES

pytestmark = cluster_marks(slurm.unavailable())
STEPS = 30
RATES = ("1e-3", "3e-3")
FLAGS = (*MODEL, *SEQUENCES, "--device", "cpu", "--steps", str(STEPS), "--mesh", "dp2")


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Hosts(2) as hosts, slurm.SlurmCluster(folder, hosts) as running:
        yield running


def test_the_runs_of_a_sweep_are_the_tasks_of_a_job_array(cluster, tmp_path):
    out = tmp_path / "a sweep"
    environment = {**cluster.environment, **ENVIRONMENT}
    weft = [sys.executable, "-m", "weft"]
    words = [*FLAGS, "--optim.lr"]
    array = [*weft, "sweep", *words, *RATES, "--out", str(out), "--array", "slurm"]
    subprocess.run([*array, "--nodes", "1"], env=environment, check=True)
    runs = [out / f"lr={rate}" for rate in RATES]
    logs = {str(task): out / "job" / f"slurm-1_{task}.log" for task in range(len(RATES))}
    for run in runs:
        wait_until(lambda run=run: last_step(run) == STEPS, f"the end of {run.name}", logs)
    wait_until(lambda: not cluster.command("squeue", "--noheader").strip(), "an empty queue", logs)
    shown = subprocess.run([*array, "--json"], env=environment, check=True, capture_output=True)
    found = json.loads(shown.stdout)["runs"]
    assert {run["name"]: run["state"] for run in found} == {run.name: "done" for run in runs}
    for rate, run in zip(RATES, runs, strict=True):
        alone = tmp_path / f"alone-{rate}"
        subprocess.run(
            [*weft, "train", *words, rate, "--out", str(alone)],
            env=environment,
            check=True,
            capture_output=True,
        )
        assert losses(run) == losses(alone)
