"""Program of test_double_launch.py: `python double_launch.py PAIRS` starts pairs of jobs on one port at the same time.

While each pair runs, a stray process does in the store what rank 1 of a third job would do. Prints
one JSON object: how the jobs ended.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import socket
import sys
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from weft.comm.world_store import agree_on_namespace
from weft.core.mesh import Mesh
from weft.errors import LaunchError
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World

MESH = Mesh.parse("dp2")
NUM_SUMS = 20
LIMIT_S = 30.0


def train(job: int, world: World) -> None:
    """Sums of numbers that only ranks of this job have."""
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        for step in range(NUM_SUMS):
            own = torch.tensor([float(job + step)])
            total = comm.all_reduce(own, "dp").item()
            if total != 2.0 * (job + step):
                sys.exit(99)


def run_job(job: int, port: int, delay_s: float, report: Connection) -> None:
    time.sleep(delay_s)
    try:
        code = launch(lambda world: train(job, world), 2, port=port)
    except LaunchError as error:
        code = 2 if f"port: cannot be opened (got {port}: " in str(error) else 98
    except BaseException:  # noqa: BLE001 - an exit code of the job
        code = 1
    report.send(code)


def stray(port: int) -> None:
    """Connect as soon as the store listens, and disturb the keys of rank 1."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=10), wait_for_workers=False)
    store.add("weft/0/joined/1", 1)
    store.add("weft/joined/1", 1)
    store.add("init/", 1)
    agree_on_namespace(store, 1, 2, job="", timeout_s=0.5)


def run_pair(number: int) -> str:
    """One pair of jobs: `ok`, or what went wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    reports = []
    processes = []
    for job in (1000, 2000):
        receiver, sender = context.Pipe(duplex=False)
        delay_s = random.Random(f"{number} {job}").random() * 0.05
        process = context.Process(target=run_job, args=(job, port, delay_s, sender))
        process.start()
        sender.close()
        reports.append(receiver)
        processes.append(process)
    disturber = context.Process(target=stray, args=(port,))
    disturber.start()
    deadline = time.monotonic() + LIMIT_S
    codes = []
    for receiver in reports:
        has_ended = receiver.poll(max(0.0, deadline - time.monotonic()))
        codes.append(receiver.recv() if has_ended else "hangs")
    for process in (*processes, disturber):
        process.kill()
        process.join()
    if "hangs" in codes:
        return "hangs"
    if 99 in codes:
        return "mixed"
    if sorted(codes) in ([0, 2], [0, 0]):
        return "ok"
    return f"codes {codes}"


def main() -> None:
    """The second job of a pair is rejected, or has started after the first had ended."""
    sys.stderr = open("/dev/null", "w")  # noqa: SIM115 - strays report their rejection
    start_s = time.monotonic()
    num_pairs = int(sys.argv[1])
    outcomes = Counter(run_pair(number) for number in range(num_pairs))
    seconds = round(time.monotonic() - start_s, 1)
    sys.stdout.write(json.dumps({**outcomes, "seconds": seconds}))


if __name__ == "__main__":
    main()
