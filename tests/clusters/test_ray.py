"""Ray on this machine: a job goes on after a killed raylet; the job server starts, stops and resumes one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


NODE = {"num_cpus": 2, "object_store_memory": MEMORY_BYTES}


@contextmanager
def ray_cluster(monkeypatch, **head: object) -> Iterator[Any]:
    """A cluster of one node, and `add_node` for more."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)
    running = Cluster(initialize_head=True, head_node_args={**NODE, **head})
    try:
        running.wait_for_nodes()
        yield running
    finally:
        running.shutdown()


@pytest.fixture
def cluster(monkeypatch):
    with ray_cluster(monkeypatch, include_dashboard=False) as running:
        for _ in range(2):
            running.add_node(**NODE)
        running.wait_for_nodes()
        yield running


@pytest.fixture
def job_server(monkeypatch):
    """The address of a job server whose raylet has no Python environment on PATH."""
    pytest.importorskip("aiohttp")  # comes with ray[default], without which there is no server
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with ray_cluster(monkeypatch, include_dashboard=True, dashboard_port=port):
        monkeypatch.setenv("PATH", path)
        yield f"http://127.0.0.1:{port}"


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


def test_the_job_server_starts_stops_and_resumes_a_job(job_server, tmp_path):
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(job_server)
    out = tmp_path / "a run"
    launch = [sys.executable, "-m", "weft", "launch", "ray", *FLAGS, "--mesh", "dp2"]
    launch += ["--nodes", "1", "--out", str(out), "--address", job_server, "--save.keep", "100"]
    scripts = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": os.pathsep.join((scripts, os.environ["PATH"]))}

    def submit(*words: str) -> str:
        known = {job.submission_id for job in client.list_jobs()}
        done = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True)
        assert "submitted: ray job submit" in done.stdout, done.stderr
        (job,) = {job.submission_id for job in client.list_jobs()} - known
        return job

    first = submit()
    log = tmp_path / "job.log"

    def has_ended(job: str) -> bool:
        log.write_text(client.get_job_logs(job), encoding="utf-8")
        return client.get_job_status(job).is_terminal()

    wait_until(lambda: has_ended(first) or last_step(out) >= 30, "step 30", {"job": log})
    client.stop_job(first)
    wait_until(lambda: has_ended(first), "the stop", {"job": log})
    stopped_after = last_step(out)
    assert stopped_after < STEPS
    second = submit("--resume", "auto")
    wait_until(lambda: has_ended(second), "the end", {"job": log})
    assert client.get_job_status(second) == JobStatus.SUCCEEDED, log.read_text(encoding="utf-8")
    assert resumed_from(out) == [stopped_after]  # SIGTERM saved the step that was done
    assert losses(out) == losses_on_one_host(tmp_path, "dp2")


def node_of_rank(cluster):
    """A node besides the head, all of which run one rank."""
    return next(iter(cluster.worker_nodes))
