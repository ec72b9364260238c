"""Two hosts without a shared folder (torchrun, network and mount namespaces): save, resume on another layout, full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
from tests.clusters.training import (
    ENVIRONMENT,
    FLAGS,
    cluster_marks,
    losses,
    resumed_from,
    wait_until,
)
from weft.checkpoint.folder import checkpoints
from weft.checkpoint.remote import RemoteFolder

pytestmark = cluster_marks(hosts_module.unavailable())
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "{host}:29400", "--rdzv-id", "apart")
FIRST = ("--mesh", "dp2", "--steps", "40")
SECOND = ("--mesh", "tp2", "--steps", "60", "--resume", "auto")
SAME_RATE = ("--optim.decay", "constant", "--save.keep", "100")


def train_on_hosts(hosts: Hosts, flags: tuple[str, ...], *, out: Path, logs: Path) -> None:
    """Train to the end."""
    codes, texts = run_on_hosts(hosts, flags, out=out, logs=logs)
    assert codes == [0, 0], texts


def run_on_hosts(
    hosts: Hosts, flags: tuple[str, ...], *, out: Path, logs: Path
) -> tuple[list[int], str]:
    """Train; the exit codes of the agents, and the ends of their logs. Each host has a /dev/shm of its own."""
    agents = []
    files = {name: logs / f"{name}.log" for name in hosts.names}
    for index, name in enumerate(hosts.names):
        rendezvous = [word.format(host=hosts.names[0]) for word in RENDEZVOUS]
        words = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nnodes", "2"]
        words += ["--nproc-per-node", "1", "--node-rank", str(index), "-m", "weft", "train"]
        words += [*FLAGS, *flags, *SAME_RATE, "--out", str(out)]
        memory = logs / f"memory-{name}"
        memory.mkdir(exist_ok=True)
        words = ["sh", "-c", hosts_module.ENTER, "enter", str(memory), "/dev/shm", *words]
        agents.append(hosts.start(index, words, env=ENVIRONMENT, log=files[name]))
    try:
        wait_until(lambda: all(agent.poll() is not None for agent in agents), "the end", files)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    ends = [path.read_text(errors="replace")[-3000:] for path in files.values()]
    return [agent.returncode for agent in agents], "\n".join(ends)


def test_hosts_without_a_shared_folder_save_and_resume_on_another_layout(tmp_path):
    private = tmp_path / "disk"
    out = private / "run"
    with Hosts(2, rate="1gbit", prefix="apart", network=79, private=private) as hosts:
        disks = [hosts.private_folder(index) / "run" for index in range(2)]
        train_on_hosts(hosts, FIRST, out=out, logs=tmp_path)
        assert not any(private.iterdir())
        saved = [[step for step, _ in checkpoints(disk)] for disk in disks]
        owner = 0 if saved[0] else 1  # torchrun's rendezvous decides where rank 0 runs
        assert saved[owner] == [40, 20]
        assert saved[1 - owner] == []
        train_on_hosts(hosts, SECOND, out=out, logs=tmp_path)
    assert resumed_from(disks[owner]) == [40]
    assert len(losses(disks[owner])) == 60
    assert losses(disks[owner]) == losses_of_one_host(tmp_path)


@pytest.fixture
def small_disks(tmp_path):
    """The disks of two hosts, with room for one checkpoint and no second one; `grow` makes room."""
    disks = [tmp_path / f"disk-full{index}" for index in range(2)]
    for disk in disks:
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=280k", "weft", disk], check=True)
    yield disks
    for disk in disks:
        subprocess.run(["umount", "-l", disk], check=True)


def test_hosts_whose_disks_are_full_at_the_end_keep_the_state(small_disks, tmp_path):
    private = tmp_path / "disk"
    full = (*FIRST, "--save.wait_s", "3")
    with Hosts(2, rate="1gbit", prefix="full", network=81, private=private) as hosts:
        codes, texts = run_on_hosts(hosts, full, out=private / "run", logs=tmp_path)
        assert codes == [1, 1], texts
        assert "finished after step 40, which could not be saved" in texts
        assert "It is kept in memory until this machine ends: /dev/shm/weft-kept-" in texts
        (owner,) = [disk / "run" for disk in small_disks if any(checkpoints(disk / "run"))]
        assert [step for step, _ in checkpoints(owner)] == [40, 20]
        kept = [list(memory.iterdir()) for memory in tmp_path.glob("memory-*")]
        assert sorted(map(len, kept)) == [0, 1], "on the host of rank 0 alone"
        for disk in small_disks:
            subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        train_on_hosts(hosts, SECOND, out=private / "run", logs=tmp_path)
    assert resumed_from(owner) == [40]
    assert losses(owner) == losses_of_one_host(tmp_path)


def losses_of_one_host(folder: Path) -> dict[int, float]:
    """Step -> loss of the same two runs with local ranks."""
    one_host = folder / "one-host"
    for flags in (FIRST, SECOND):
        words = [sys.executable, "-m", "weft", "train", *FLAGS, *flags, *SAME_RATE]
        subprocess.run(
            [*words, "--out", str(one_host)],
            env={**os.environ, **ENVIRONMENT},
            check=True,
            capture_output=True,
        )
    return losses(one_host)


def test_hosts_that_lose_their_disks_resume_from_a_url(tmp_path):
    private = tmp_path / "disk"
    url = f"file://{tmp_path}/bucket/run"
    remote = ("--save.remote", url)
    with Hosts(2, rate="1gbit", prefix="lost", network=80, private=private) as hosts:
        disks = [hosts.private_folder(index) / "run" for index in range(2)]
        train_on_hosts(hosts, (*FIRST, *remote), out=private / "run", logs=tmp_path)
        assert RemoteFolder.open(url).newest() == 40
        for disk in disks:
            shutil.rmtree(disk, ignore_errors=True)
        train_on_hosts(hosts, (*SECOND, *remote), out=private / "run", logs=tmp_path)
    (owner,) = [disk for disk in disks if resumed_from(disk)]
    assert resumed_from(owner) == [40]
    assert RemoteFolder.open(url).newest() == 60
    assert losses(owner) == losses_of_one_host(tmp_path)
