"""torchrun on two hosts (network namespaces) with several ranks on each, equally many and not: losses of one host."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
from tests.clusters.training import ENVIRONMENT, FLOAT64, cluster_marks, losses, losses_on_one_host
from tests.tiny_run import TINY

pytestmark = cluster_marks(hosts_module.unavailable())
TIMEOUT_S = 240
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "nodes0:29400", "--rdzv-id", "ranks")
FLAGS = (
    *TINY,
    *("--transport", "process", "--device", "cpu"),
    *("--batch.global_size", "12", "--steps", "8", "--parallel.zero", "1"),
    *FLOAT64,
)
SCRIPT = """
import torch, weft
comm = weft.init("dp2 tp2")
x = torch.arange(100_000.0) * (comm.rank + 1)
total = comm.all_reduce(x, ("dp", "tp"))
assert torch.equal(total, torch.arange(100_000.0) * 10)
print("sum is right on rank", comm.rank)
"""


def start_on_hosts(
    hosts: Hosts, counts: tuple[int, ...], words: list[str], folder: Path
) -> tuple[list[int], str]:
    """Exit codes of the agents, which start so many ranks of a program each, and their output."""
    agents, logs = [], [folder / f"{name}.log" for name in hosts.names]
    for index, count in enumerate(counts):
        command = [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, "--nnodes", "2"]
        command += ["--nproc-per-node", str(count), *words]
        agents.append(hosts.start(index, command, env=ENVIRONMENT, log=logs[index]))
    try:
        codes = [agent.wait(TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    return codes, "\n".join(log.read_text(errors="replace") for log in logs)


@pytest.mark.parametrize("counts", [(3, 1), (2, 2)])
def test_hosts_train_as_one_host(counts, tmp_path):
    with Hosts(2, prefix="nodes", network=79) as hosts:
        for mesh in ("dp4", "pp2 tp2"):
            folder = tmp_path / mesh.replace(" ", "-")
            folder.mkdir()
            flags = [*FLAGS, "--mesh", mesh, "--out", str(folder / "run")]
            codes, text = start_on_hosts(hosts, counts, ["-m", "weft", "train", *flags], folder)
            assert codes == [0, 0], text[-6000:]
            expected = losses_on_one_host(folder, mesh, FLAGS)
            assert losses(folder / "run") == pytest.approx(expected, rel=1e-12)
            assert len(expected) == 8


@pytest.mark.parametrize("counts", [(3, 1), (2, 2)])
def test_a_script_finds_its_ranks_on_hosts(counts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with Hosts(2, prefix="nodes", network=79) as hosts:
        codes, text = start_on_hosts(hosts, counts, [str(script)], tmp_path)
    assert codes == [0, 0], text[-6000:]
    assert text.count("sum is right on rank") == 4
