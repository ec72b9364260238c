"""Driver of a Ray job: one actor for each node starts the ranks there; all start again after a failure. Needs Ray."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER, first_line

POLL_S = 0.2
PLACEMENT_NOTE_S = 60.0
"""Time after which the driver says that it waits for nodes."""
END_S = 60.0
"""How long ranks may take to end after one of them has."""


@dataclass(frozen=True)
class RayJob:
    """What the driver runs.

    Attributes:
        config: path of the run config, the same on every node.
        flags: of `weft train` beside it.
        restarts: how often ranks are started again after a failure; a stop that has saved does not
            count.
    """

    name: str
    config: str
    work_folder: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_node: int
    restarts: int
    flags: tuple[str, ...] = ()


class NodeRanks:
    """The ranks of one node: an actor. They end with it, see `weft.run.agent`."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []

    def address(self) -> tuple[str, int]:
        """Address of this node in the cluster, and a free port there."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def start(self, job: RayJob, variables: dict[str, str], first_rank: int) -> None:
        """Start the ranks `first_rank` and following."""
        command = [sys.executable, "-m", "weft", "train", job.config, *job.flags]
        for local_rank in range(job.ranks_per_node):
            own = {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
            environment = {**os.environ, **variables, **own}
            process = subprocess.Popen(  # noqa: S603 - this Python
                command, cwd=job.work_folder, env=environment
            )
            self._ranks.append(process)

    def codes(self) -> list[int | None]:
        """Exit codes of the ranks; None: still running."""
        return [rank.poll() for rank in self._ranks]

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that run."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def run_job(job: RayJob) -> int:
    """Run the job on the cluster of this machine; returns the exit code.

    SIGTERM (`ray job stop`) makes the ranks save and end.
    """
    try:
        import ray
    except ImportError:
        _note("error: ray is not installed. Fix: pip install 'weft-train[ray]'")
        return EXIT_USER
    ray.init(address="auto", ignore_reinit_error=True)
    stop = _StopSignal()
    failures = 0
    starts = 0
    while True:
        code = _run_once(job, stop, starts)
        starts += 1
        if code in (EXIT_OK, EXIT_USER) or stop.received:
            return code
        if code == EXIT_PREEMPTED:
            _note("the ranks have saved; they are started again")
            continue
        failures += 1
        if failures > job.restarts:
            return code
        _note(f"start {failures} of {job.restarts} after a failure")


def _run_once(job: RayJob, stop: _StopSignal, starts: int) -> int:
    """Start all ranks and wait for them; the exit code of the job."""
    import ray

    group = _place(job)
    options: dict[str, Any] = {
        "num_cpus": job.cpus_per_node,
        "num_gpus": job.gpus_per_node,
        "placement_group": group,
        "max_restarts": 0,
    }
    actor_class = ray.remote(NodeRanks)
    nodes = []
    try:
        for index in range(job.nodes):
            node = actor_class.options(placement_group_bundle_index=index, **options).remote()
            nodes.append(node)
        host, port = ray.get(nodes[0].address.remote())
        variables = _variables(job, starts, host, port)
        started = []
        for index, node in enumerate(nodes):
            first_rank = index * job.ranks_per_node
            started.append(node.start.remote(job, variables, first_rank))
        ray.get(started)
        return _wait(nodes, stop)
    except ray.exceptions.RayError as error:
        _note(f"a node was lost: {first_line(error)}")
        return EXIT_FAILED
    finally:
        for node in nodes:
            ray.kill(node)
        ray.util.remove_placement_group(group)


def _place(job: RayJob) -> Any:
    """Reserve the nodes; waits until the cluster has them."""
    import ray

    bundle = {"CPU": job.cpus_per_node}
    if job.gpus_per_node:
        bundle["GPU"] = job.gpus_per_node
    group = ray.util.placement_group([dict(bundle) for _ in range(job.nodes)], strategy="SPREAD")
    if not group.wait(PLACEMENT_NOTE_S):
        _note(f"waits for {job.nodes} nodes with {bundle}")
        ray.get(group.ready())
    return group


def _variables(job: RayJob, starts: int, host: str, port: int) -> dict[str, str]:
    """torchrun's variables, which are the same for all ranks."""
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job.nodes * job.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "TORCHELASTIC_RUN_ID": job.name,
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        "WEFT_JOB": f"ray {job.name}",
    }


def _wait(nodes: list[Any], stop: _StopSignal) -> int:
    """Wait until all ranks have ended, or END_S after the first has failed; the exit code.

    Raises:
        RayError: a node is lost.
    """
    import ray

    deadline: float | None = None
    while True:
        per_node = ray.get([node.codes.remote() for node in nodes])
        codes = list(itertools.chain.from_iterable(per_node))
        ended = [code for code in codes if code is not None]
        has_failed = any(code != EXIT_OK for code in ended)
        is_late = deadline is not None and time.monotonic() > deadline
        if len(ended) == len(codes) or is_late:
            return _job_code(ended)
        if has_failed and deadline is None:
            deadline = time.monotonic() + END_S
        if stop.received and not stop.is_sent:
            ray.get([node.signal.remote(signal.SIGTERM) for node in nodes])
            stop.is_sent = True
        time.sleep(POLL_S)


def _job_code(codes: list[int]) -> int:
    """The exit code of a job: a failure counts before wrong input, wrong input before a stop."""
    failures = [code for code in codes if code not in (EXIT_OK, EXIT_USER, EXIT_PREEMPTED)]
    if EXIT_USER in codes:
        return EXIT_USER
    if failures:
        return EXIT_FAILED
    return max(codes, default=EXIT_OK)


class _StopSignal:
    """Records SIGTERM while the driver runs."""

    def __init__(self) -> None:
        self.received = False
        self.is_sent = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True


def _note(text: str) -> None:
    sys.stderr.write(f"weft: {text}\n")
    sys.stderr.flush()
