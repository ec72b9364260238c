"""Collectives of CPU ranks on two hosts (network namespaces): by host in shared memory, against gloo alone. Needs root.

PYTHONPATH=. .venv/bin/python -m benchmarks.collectives_on_hosts [--rate 1gbit] [--ranks 4] [--rounds 4]

Both ways run in turns in one process of each rank; the least time of all rounds is compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore

from tests.clusters.hosts import Hosts
from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.core.mesh import Mesh

PORT = 29533
TIMEOUT_S = 500
SIZES = {2**18: 10, 2**22: 5, 2**25: 3}
"""Bytes of a tensor -> calls of a round."""
CALLS: dict[str, Callable[[Comm, Tensor], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce_(x, "dp"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter_(x, "dp"),
    "all_gather": lambda comm, x: comm.all_gather_(x, "dp"),
    "broadcast": lambda comm, x: comm.broadcast_(x, "dp"),
    "all_to_all": lambda comm, x: comm.all_to_all(x, "dp"),
}


def measure(rank: int, size: int, address: str, *, rounds: int) -> None:
    """The part of one rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    store = TCPStore(address, PORT, None, rank == 0, timeout, wait_for_workers=False)
    comms: dict[str, Comm] = {}
    for name in ("gloo", "by host"):
        is_flat = name == "gloo"
        made = ProcessTransport(rank, size, store, nonce=name, deterministic=is_flat)
        comms[name] = Comm(Mesh.parse(f"dp{size}"), rank, made)
        comms[name].checked = False
    for num_bytes, repeats in SIZES.items():
        for op, call in CALLS.items():
            times = {name: [] for name in comms}
            for _ in range(rounds):
                for name, comm in comms.items():
                    times[name].append(_ms(comm, call, num_bytes, repeats))
            if rank == 0:
                least = {name: min(of_name) for name, of_name in times.items()}
                ratio = least["gloo"] / least["by host"]
                texts = [f"{name} {ms:8.2f} ms" for name, ms in least.items()]
                print(
                    f"{op:15} {num_bytes >> 10:6} KiB  {'  '.join(texts)}  {ratio:.2f}", flush=True
                )
    for comm in comms.values():
        comm.barrier("dp")


def _ms(comm: Comm, call: Callable[[Comm, Tensor], object], num_bytes: int, repeats: int) -> float:
    x = torch.zeros(num_bytes // 4)
    call(comm, x)
    comm.barrier("dp")
    start_s = time.monotonic()
    for _ in range(repeats):
        call(comm, x)
    comm.barrier("dp")
    return 1e3 * (time.monotonic() - start_s) / repeats


def main() -> int:
    """Start the ranks on both hosts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rate", default="1gbit", help="of both links, as tc reads it; '': no limit"
    )
    parser.add_argument("--ranks", type=int, default=4, help="on each host")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = 2 * given.ranks
    hosts = Hosts(2, rate=given.rate, prefix="bench", network=80)
    if given.rank is not None:
        measure(given.rank, size, hosts.address(0), rounds=given.rounds)
        return 0
    words = [sys.executable, "-m", "benchmarks.collectives_on_hosts", *sys.argv[1:]]
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "eth0"}
    with hosts, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(size)]
        processes = [
            hosts.start(rank // given.ranks, [*words, "--rank", str(rank)], env=env, log=logs[rank])
            for rank in range(size)
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        failed = next((log for log, code in zip(logs, codes, strict=True) if code), logs[0])
        print(failed.read_text(errors="replace"))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
