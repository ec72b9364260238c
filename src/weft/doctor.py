"""Owns the look at this machine: versions, devices, cores, memory, folders, and whether ranks here can meet."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from weft.comm.comm import Comm
from weft.errors import WeftError
from weft.testing import run_ranks

PACKAGES = ("weft", "torch", "numpy", "pydantic", "tyro", "rich", "safetensors")
EXTRAS = ("scikit-learn", "transformers")
LEAST_MEMORY_GIB = 1.0
LEAST_SHARED_GIB = 0.0625
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; a fix stands where it has to be mended."""

    name: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{'BAD' if self.fix else 'ok '}  {self.name:<13} {self.text}" + (
            f". Fix: {self.fix}" if self.fix else ""
        )


def examine() -> tuple[Finding, ...]:
    """Look at everything; nothing is changed."""
    return (_versions(), *_gpus(), _cores(), _memory(), _shared_memory(), _byte_code(), _ranks_meet())


def _versions() -> Finding:
    found = [f"{name} {number}" for name in (*PACKAGES, *EXTRAS) if (number := _version(name))]
    return Finding("versions", f"Python {platform.python_version()}, {', '.join(found)}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("gpus", "none that this torch can use: ranks compute on the CPU")
    for index in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(index)
        size = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free"
        yield Finding(f"gpu {index}", f"{torch.cuda.get_device_name(index)}, {size}")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return Finding("cores", f"{cores} for this process{load}")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    is_little = memory.available < LEAST_MEMORY_GIB * GIB
    return Finding("memory", text, f"free some: a small run takes {LEAST_MEMORY_GIB:g} GiB" if is_little else "")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free / GIB
    except OSError:
        return Finding("shared memory", "no /dev/shm here: NCCL between local ranks is slower")
    fix = "make /dev/shm larger (docker run --shm-size=1g)" if free < LEAST_SHARED_GIB else ""
    return Finding("shared memory", f"{free:.2f} GiB free in /dev/shm", fix)


def _byte_code() -> Finding:
    if sys.dont_write_bytecode:
        return Finding(
            "byte code", "is not kept (PYTHONDONTWRITEBYTECODE): imports take longer where none was compiled"
        )
    return Finding("byte code", "is kept")


def _ranks_meet() -> Finding:
    """Two real ranks add their numbers."""
    start = time.perf_counter()
    try:
        sums = run_ranks("dp2", _sum_of_ranks, transport="processes")
    except (WeftError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        return Finding(
            "ranks", f"two local ranks do not meet: {reason}", "look at the firewall and at GLOO_SOCKET_IFNAME"
        )
    seconds = time.perf_counter() - start
    if sums != [1.0, 1.0]:
        return Finding("ranks", f"two local ranks add 0 and 1 to {sums}", "update torch")
    return Finding("ranks", f"two local ranks met and added their numbers in {seconds:.1f} s")


def _sum_of_ranks(comm: Comm) -> float:
    return float(comm.all_reduce(torch.tensor(float(comm.rank)), "dp"))
