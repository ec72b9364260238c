"""Slurm, three nodes: one is lost with its memory, and the job goes on from the snapshots in the memory of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.clusters import slurm
from tests.clusters.hosts import Hosts
from tests.clusters.test_slurm import rank_on
from tests.clusters.training import (
    ENVIRONMENT,
    FLAGS,
    STEPS,
    cluster_marks,
    events,
    last_step,
    losses,
    losses_on_one_host,
    repeated_losses_differ,
    wait_until,
)
from weft.run.node_keeper import LOCK, remove_folders_without_keeper
from weft.run.private_folder import MEMORY_FOLDER

pytestmark = cluster_marks(slurm.unavailable())


def kept_folders():
    return {path.parent for path in MEMORY_FOLDER.glob(f"weft-*/{LOCK}")}


def lost_memory_is_removed():
    """The memory of the lost node; here nodes share that of one machine."""
    remove_folders_without_keeper()
    return len(kept_folders()) == 2


def test_a_lost_node_of_slurm_loses_no_snapshot(tmp_path, record_property):
    out = tmp_path / "run"
    folder = tmp_path / "slurm"
    folder.mkdir()
    logs = {"job": out / "job" / "slurm-1.log", "slurmctld": folder / "slurmctld.log"}
    words = [sys.executable, "-m", "weft", "launch", "slurm", *FLAGS[:-2], "--mesh", "dp2"]
    words += ["--nodes", "2", "--spare_nodes", "1", "--out", str(out)]
    words += ["--save.every", "0", "--save.memory_every", "2", "--run.restarts", "5"]

    def resumes():
        return [event for event in events(out) if event["event"] == "resume" and event["step"]]

    def goes_on(number):
        return wait_until(lambda: len(resumes()) == number, f"resume {number}", logs)

    with Hosts(3) as hosts, slurm.SlurmCluster(folder, hosts) as cluster:
        subprocess.run(words, env={**cluster.environment, **ENVIRONMENT}, check=True)
        wait_until(lambda: last_step(out) >= 20, "step 20", logs)
        assert len(kept_folders()) == 3, "one on every node"
        os.kill(rank_on(cluster, 1), signal.SIGKILL)
        lost_at = [last_step(out)]
        times = [goes_on(1)]
        wait_until(lambda: last_step(out) >= lost_at[0] + 20, "20 more steps", logs)
        cluster.kill_node(1)
        wait_until(lost_memory_is_removed, "its keeper has ended", logs)
        lost_at.append(last_step(out))
        times.append(goes_on(2))
        wait_until(lambda: cluster.job_state("1") == "COMPLETED", "the job completes", logs)
        wait_until(lambda: not kept_folders(), "no folder in memory is left", logs)
    for lost, resume, seconds in zip(lost_at, resumes(), times, strict=True):
        record_property("lost_steps", lost - resume["step"])
        record_property("resumed_after_s", round(seconds, 1))
        assert str(MEMORY_FOLDER) in resume["path"]
        assert lost - 5 <= resume["step"] <= lost + 1
    assert losses(out) == losses_on_one_host(tmp_path, "dp2")
    assert len(losses(out)) == STEPS
    assert not repeated_losses_differ(out)
