"""torchrun on two hosts: one is lost with its memory, and the run goes on from the copies that the other one holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
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
from weft.run.private_folder import MEMORY_FOLDER

pytestmark = cluster_marks(hosts_module.unavailable())
RENDEZVOUS = (
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "weft0:29400", "--rdzv-id", "lost"),
    *("--nproc-per-node", "1", "--nnodes", "2", "--max-restarts", "5"),
)

JOINABLE = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""An agent may join later."""


def snapshot_folders() -> set[str]:
    return {path.name for path in MEMORY_FOLDER.glob("weft-*/pieces")}


@pytest.mark.parametrize("mesh", ["dp2"])
def test_a_lost_node_loses_no_snapshot(mesh, tmp_path, record_property):
    out = tmp_path / "run"
    no_saves = ("--save.every", "0", "--save.memory_every", "2", "--mesh", mesh)
    words = [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, "-m", "weft", "train"]
    words += [*FLAGS[:-2], *no_saves, "--out", str(out)]
    before = snapshot_folders()
    with Hosts(2) as hosts:
        logs = {name: tmp_path / f"{name}.log" for name in hosts.names}

        def start(index: int) -> subprocess.Popen[bytes]:
            return hosts.start(index, words, env=JOINABLE, log=logs[hosts.names[index]])

        agents = [start(0), start(1)]
        try:
            wait_until(lambda: last_step(out) >= 20, "step 20", logs)
            os.killpg(agents[1].pid, signal.SIGKILL)
            agents[1].wait()
            lost_at = last_step(out)
            agents[1] = start(1)
            wait_until(lambda: last_step(out) > lost_at + 5, "goes on", logs)
            wait_until(lambda: all(agent.poll() is not None for agent in agents), "end", logs)
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
                    agent.wait()
    (resume,) = [event for event in events(out) if event["event"] == "resume"]
    record_property("lost_steps", lost_at - resume["step"])
    assert str(MEMORY_FOLDER) in resume["path"]
    assert lost_at - 5 <= resume["step"] <= lost_at + 1
    assert losses(out) == losses_on_one_host(tmp_path, mesh)
    assert len(losses(out)) == STEPS
    assert not repeated_losses_differ(out)
    assert snapshot_folders() <= before, "removed at the end of the run, or of the agent"
