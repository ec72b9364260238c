"""torchrun on several hosts (network namespaces, links of 1 Gbit/s): a link is cut for 10 seconds and restored."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
from tests.clusters.training import (
    ENVIRONMENT,
    FLAGS,
    STEPS,
    last_step,
    losses,
    losses_on_one_host,
    repeated_losses_differ,
    resumed_from,
    wait_until,
)

REASON = hosts_module.unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(900),
]
CUT_S = 10.0
RIDES_OUT = ("--run.timeout_s", "60")
"""A limit above the length of the cut: the ranks wait for the link, TCP sends again what was lost."""


@pytest.mark.parametrize(
    ("size", "flags"),
    [(2, RIDES_OUT), (4, RIDES_OUT), (2, ()), (4, ())],
    ids=["2-limit60", "4-limit60", "2-default", "4-default"],
)
def test_a_link_is_cut_and_restored(size, flags, tmp_path, record_property):
    mesh = f"dp{size}"
    out = tmp_path / "run"
    with Hosts(size, rate="1gbit") as hosts:
        logs = {name: tmp_path / f"{name}.log" for name in hosts.names}
        agents = []
        for index, name in enumerate(hosts.names):
            words = [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS]
            words += ["--nnodes", str(size), "-m", "weft", "train", *FLAGS, *flags]
            words += ["--mesh", mesh, "--out", str(out), "--save.keep", "100"]
            agents.append(hosts.start(index, words, env=ENVIRONMENT, log=logs[name]))
        try:
            wait_until(lambda: last_step(out) >= 30, "step 30", logs)
            step = last_step(out)
            hosts.cut(size - 1)
            time.sleep(CUT_S)
            hosts.restore(size - 1)
            restored_s = time.monotonic()
            assert last_step(out) <= step + 5
            wait_until(lambda: last_step(out) > step + 20 or resumed_from(out), "goes on", logs)
            record_property("goes_on_after_s", round(time.monotonic() - restored_s, 1))
            wait_until(lambda: all(agent.poll() is not None for agent in agents), "the end", logs)
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
                    agent.wait()
    texts = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs.values())
    assert [agent.returncode for agent in agents] == [0] * size, texts
    assert losses(out) == losses_on_one_host(tmp_path, mesh)
    assert len(losses(out)) == STEPS
    assert not repeated_losses_differ(out)
    record_property("resumed_from", resumed_from(out))
    if flags:
        assert resumed_from(out) == []


RENDEZVOUS = (
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "weft0:29400", "--rdzv-id", "cut"),
    *("--nproc-per-node", "1", "--max-restarts", "3"),
)
