"""torchrun on several hosts (network namespaces, links of 1 Gbit/s): a link is cut for 10 seconds and restored."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
from tests.clusters.training import (
    ENVIRONMENT,
    FLAGS,
    FLOAT64,
    STEPS,
    cluster_marks,
    last_step,
    losses,
    losses_on_one_host,
    repeated_losses_differ,
    resumed_from,
    wait_until,
)

pytestmark = cluster_marks(hosts_module.unavailable())
CUT_S = 10.0
RIDES_OUT = ("--run.timeout_s", "60")
"""A limit above the length of the cut: the ranks wait for the link, TCP sends again what was lost."""
GIVES_UP = ("--run.timeout_s", "4")
"""A limit below it: the ranks end, and the agents start them again."""
DELAY_MS = 5.0
RENDEZVOUS = (
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "weft0:29400", "--rdzv-id", "cut"),
    *("--max-restarts", "5", "--nproc-per-node"),
)


@dataclass(frozen=True)
class Cut:
    """A run over whose links a cut goes."""

    out: Path
    logs: dict[str, Path]
    goes_on_after_s: float

    def text(self) -> str:
        """Output of all agents and ranks."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs.values())


def train_over_a_cut(
    hosts: Hosts, folder: Path, flags: tuple[str, ...], *, mesh: str, per_host: int = 1
) -> Cut:
    """Train to the end; the link of the last host is cut for CUT_S at step 30.

    Args:
        per_host: ranks on each host.
    """
    out = folder / "run"
    logs = {name: folder / f"{name}.log" for name in hosts.names}
    agents = []
    for index, name in enumerate(hosts.names):
        words = [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, str(per_host)]
        words += ["--nnodes", str(hosts.size), "-m", "weft", "train", *FLAGS, *flags]
        words += ["--mesh", mesh, "--out", str(out), "--save.keep", "100"]
        agents.append(hosts.start(index, words, env=ENVIRONMENT, log=logs[name]))
    try:
        wait_until(lambda: last_step(out) >= 30, "step 30", logs)
        step = last_step(out)
        hosts.cut(hosts.size - 1)
        time.sleep(CUT_S)
        hosts.restore(hosts.size - 1)
        restored_s = time.monotonic()
        assert last_step(out) <= step + 5

        def goes_on() -> bool:
            return last_step(out) > step + 20 or resumed_from(out)

        wait_until(goes_on, "goes on", logs)
        goes_on_after_s = time.monotonic() - restored_s
        wait_until(lambda: all(agent.poll() is not None for agent in agents), "the end", logs)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    cut = Cut(out, logs, goes_on_after_s)
    returncodes = [agent.returncode for agent in agents]
    assert returncodes == [0] * hosts.size, cut.text()[-6000:]
    return cut


@pytest.mark.parametrize(
    ("size", "flags", "delay_ms"),
    [
        (2, RIDES_OUT, 0.0),
        (4, RIDES_OUT, 0.0),
        (2, (), 0.0),
        (4, (), 0.0),
        (2, GIVES_UP, 0.0),
        (2, RIDES_OUT, DELAY_MS),
        (2, GIVES_UP, DELAY_MS),
    ],
    ids=[
        "2-limit60",
        "4-limit60",
        "2-default",
        "4-default",
        "2-limit4",
        "2-limit60-delay",
        "2-limit4-delay",
    ],
)
def test_a_link_is_cut_and_restored(size, flags, delay_ms, tmp_path, record_property):
    with Hosts(size, rate="1gbit", delay_ms=delay_ms) as hosts:
        cut = train_over_a_cut(hosts, tmp_path, flags, mesh=f"dp{size}")
    record_property("goes_on_after_s", round(cut.goes_on_after_s, 1))
    record_property("resumed_from", resumed_from(cut.out))
    assert losses(cut.out) == losses_on_one_host(tmp_path, f"dp{size}")
    assert len(losses(cut.out)) == STEPS
    assert not repeated_losses_differ(cut.out)
    if flags == RIDES_OUT:
        assert resumed_from(cut.out) == []
    if flags == GIVES_UP:
        assert resumed_from(cut.out), cut.text()[-6000:]
        assert re.search(r"error: rank \d \(dp\d\)( on weft\d)?: ", cut.text()), cut.text()[-6000:]


@pytest.mark.parametrize("flags", [RIDES_OUT, GIVES_UP], ids=["limit60", "limit4"])
def test_a_link_between_hosts_of_several_ranks_is_cut(flags, tmp_path):
    """The ranks of a host share memory, and each sends over the link."""
    mesh = "dp2 tp2"
    with Hosts(2, rate="1gbit") as hosts:
        cut = train_over_a_cut(hosts, tmp_path, (*FLOAT64, *flags), mesh=mesh, per_host=2)
    expected = losses_on_one_host(tmp_path, mesh, (*FLAGS, *FLOAT64))
    assert losses(cut.out) == pytest.approx(expected, rel=1e-9)
    assert len(expected) == STEPS
    assert not repeated_losses_differ(cut.out)
    assert bool(resumed_from(cut.out)) == (flags == GIVES_UP), cut.text()[-6000:]
