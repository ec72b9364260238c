"""A Slurm cluster on one machine: munged, slurmctld, and one slurmd in each of several network namespaces. Needs root.

By hand: python -m tests.clusters.slurm FOLDER COMMAND... runs a command with a cluster of 3 nodes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.clusters.hosts import Hosts
from tests.clusters.hosts import unavailable as hosts_unavailable

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
CREDENTIALS_S = 5
"""Life of credentials: a job that is queued again waits this long."""
START_S = 60.0


def unavailable() -> str:
    """Why there can be no cluster here; "" if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs slurm-wlm and munge ({', '.join(missing)} missing)"
    return hosts_unavailable()


class SlurmCluster:
    """Slurm with one node in each host; ends on exit of the `with` block.

    Args:
        folder: configuration, logs and state; removed by the caller.
        cpus: of each node.
    """

    def __init__(self, folder: Path, hosts: Hosts, *, cpus: int = 2):
        self.folder = folder
        self.hosts = hosts
        self.cpus = cpus
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for sbatch and the other commands."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        with ExitStack() as stack:
            stack.callback(self._end_steps)
            self._start_munge(stack)
            self._write_config()
            self._start(stack, ["slurmctld", "-D"], "slurmctld")
            for index in range(self.hosts.size):
                self.nodes.append(self._start_node(index))
            stack.callback(self._end_nodes)
            _wait_until(self._all_idle, "nodes are not idle")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def command(self, *words: str) -> str:
        """The output of a Slurm command."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def job_state(self, job: str) -> str:
        """State of a job: PENDING, RUNNING, COMPLETED, ..."""
        line = self.command("scontrol", "--oneliner", "show", "job", job)
        return line.partition("JobState=")[2].split()[0]

    def kill_node(self, index: int) -> None:
        """Kill a node: its slurmd and everything that runs on it, at once."""
        pids = self.processes_on(index)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.nodes[index].wait()

    def restart_node(self, index: int) -> None:
        """Start a killed node again."""
        self.nodes[index] = self._start_node(index)

    def processes_on(self, index: int) -> list[int]:
        """Processes on a node."""
        name = self.hosts.names[index]
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        return [int(word) for word in listed.stdout.split()]

    def _start_node(self, index: int) -> subprocess.Popen[bytes]:
        name = self.hosts.names[index]
        words = ["slurmd", "-D", "-N", name]
        log = self.folder / f"{name}.log"
        return self.hosts.start(index, words, env=self.environment, log=log)

    def _start_munge(self, stack: ExitStack) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        words = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder / 'munge.socket'}",
            f"--key-file={key}",
            f"--pid-file={self.folder / 'munged.pid'}",
            f"--log-file={self.folder / 'munged.log'}",
            f"--seed-file={self.folder / 'munged.seed'}",
        ]
        self._start(stack, words, "munge")
        _wait_until((self.folder / "munge.socket").exists, "munged does not start")

    def _start(self, stack: ExitStack, words: list[str], name: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                words,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.callback(_end, process)

    def _write_config(self) -> None:
        hosts = self.hosts
        state = self.folder / "state"
        state.mkdir()
        for name in hosts.names:
            (self.folder / f"spool-{name}").mkdir()
        lines = [
            "ClusterName=weft",
            f"SlurmctldHost={os.uname().nodename}({hosts.bridge_address})",
            "SlurmctldPort=16817",
            "SlurmdPort=16818",
            f"AuthInfo=socket={self.folder / 'munge.socket'},cred_expire={CREDENTIALS_S}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={state}",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerParameters=sched_interval=2,bf_interval=2",
            "SlurmdTimeout=10",
            "SlurmctldTimeout=10",
            "MinJobAge=3600",
            "KillWait=10",
            "ReturnToService=2",
            "JobRequeue=1",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
        ]
        for index, name in enumerate(hosts.names):
            lines.append(
                f"NodeName={name} NodeAddr={hosts.address(index)} CPUs={self.cpus} "
                "RealMemory=2000 State=UNKNOWN"
            )
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n", encoding="utf-8")

    def _all_idle(self) -> bool:
        try:
            text = self.command("sinfo", "--noheader", "--Node", "--format=%T")
        except RuntimeError:
            return False
        return text.split() == ["idle"] * self.hosts.size

    def _end_nodes(self) -> None:
        for node in self.nodes:
            _end(node)

    def _end_steps(self) -> None:
        """Kill what is left in the namespaces: steps of jobs that did not end."""
        for index in range(self.hosts.size):
            for pid in self.processes_on(index):
                os.kill(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not is_true():
        if time.monotonic() > deadline:
            raise RuntimeError(what)
        time.sleep(0.2)


def main() -> int:
    """Run a command with a cluster of three nodes."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    with Hosts(3) as hosts, SlurmCluster(folder, hosts) as cluster:
        return subprocess.run(sys.argv[2:], env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
