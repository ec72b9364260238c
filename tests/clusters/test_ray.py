"""Ray, three raylets on this machine: the written job goes on after one of them is killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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

pytestmark = cluster_marks()
MEMORY_BYTES = 80 * 2**20


@pytest.fixture
def cluster(monkeypatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)
    options = {"num_cpus": 2, "object_store_memory": MEMORY_BYTES}
    running = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(2):
            running.add_node(**options)
        running.wait_for_nodes()
        yield running
    finally:
        running.shutdown()


def test_a_job_goes_on_after_a_raylet_is_killed(cluster, tmp_path, record_property):
    out = tmp_path / "a run"
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PATH": ""}
    launch = [sys.executable, "-m", "weft", "launch", "ray", *FLAGS, "--mesh", "dp3"]
    subprocess.run(
        [*launch, "--nodes", "3", "--out", str(out), "--save.keep", "100"],
        env=environment,
        check=True,
    )
    log = tmp_path / "driver.log"
    logs = {"driver": log}
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, str(out / "job" / "ray_job.py")],
            env={**environment, "PATH": os.environ["PATH"]},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        start_s = wait_until(lambda: last_step(out) >= 1, "step 1", logs)
        wait_until(lambda: last_step(out) >= 30, "step 30", logs)
        cluster.remove_node(node_of_rank(cluster), allow_graceful=False)
        recovered_s = wait_until(lambda: bool(resumed_from(out)), "resumes", logs)
        wait_until(lambda: driver.poll() is not None, "the end", logs)
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()
    record_property("first_step_s", round(start_s, 1))
    record_property("recovered_s", round(recovered_s, 1))
    record_property("resumed_from", resumed_from(out))
    assert driver.returncode == 0, log.read_text(errors="replace")[-4000:]
    assert losses(out) == losses_on_one_host(tmp_path, "dp3")
    assert len(losses(out)) == STEPS
    assert not repeated_losses_differ(out)


def node_of_rank(cluster):
    """A node besides the head, all of which run one rank."""
    return next(iter(cluster.worker_nodes))
