"""`weft doctor`: versions, devices, cores, memory and folders of this machine, and a collective between two local ranks.

Works without torch, and reports what is missing and how to install it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from weft import __version__
from weft.commands.console import print_result, wants_help
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError, WeftError, counted, first_line
from weft.parallel.dp import AXIS as DP
from weft.run.world import num_cores
from weft.set_up import REQUIRED, Finding, examine_set_up, report, version_of

if TYPE_CHECKING:
    from weft.comm.comm import Comm

LINE = "check this machine: versions, devices, memory, local ranks"

OPTIONAL = ("tokenizers", "transformers", "peft", "pyarrow", "scikit-learn")
MIN_MEMORY_GIB = 1.0
MIN_SHARED_GIB = 0.0625
GIB = 2**30


def doctor(words: Sequence[str]) -> int:
    """Print the findings; exit code 1 if one of them is a problem."""
    if wants_help(words):
        return print_result(f"usage: weft doctor\n\n{LINE}")
    if words:
        raise UserError(
            Fault("weft doctor", "takes no arguments", got=" ".join(words), fix="weft doctor")
        )
    findings = tuple(examine())
    print_result(report(findings, verdict=_ready()))
    has_problem = any(finding.fix for finding in findings)
    return EXIT_FAILED if has_problem else EXIT_OK


def _ready() -> str:
    """What this machine is ready for."""
    torch = sys.modules.get("torch")
    gpus = torch.cuda.device_count() if torch is not None else 0
    where = counted(gpus, "GPU") if gpus else f"{counted(num_cores(), 'core')} of the CPU"
    return f"ready: runs train here on {where}; try weft train --mesh dp2 --steps 20"


def examine() -> Iterator[Finding]:
    """All checks, without changes to the machine. Those that need torch come last and only if torch
    can be imported.
    """
    yield from examine_set_up()
    yield _versions()
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _byte_code()
    problem = _torch_problem()
    if problem is not None:
        yield problem
        return
    yield from _gpus()
    yield _collective()


def _versions() -> Finding:
    found = [f"weft {__version__}"]
    for package in (*REQUIRED, *OPTIONAL):
        number = version_of(package)
        if number is not None:
            found.append(f"{package} {number}")
    return Finding("versions", ", ".join(found))


def _cores() -> Finding:
    if hasattr(os, "getloadavg"):
        load = f", load {os.getloadavg()[0]:.1f}"
    else:
        load = ""
    return Finding("cores", f"{num_cores()} for this process{load}")


def _memory() -> Finding:
    try:
        psutil = import_module("psutil")
    except ImportError as error:
        return Finding(name="memory", text=f"not checked: {error}", fix="pip install psutil")
    memory = psutil.virtual_memory()
    free_gib = memory.available / GIB
    total_gib = memory.total / GIB
    text = f"{free_gib:.1f} of {total_gib:.1f} GiB free"
    if memory.available < MIN_MEMORY_GIB * GIB:
        return Finding(
            name="memory", text=text, fix=f"free memory: a small run takes {MIN_MEMORY_GIB:g} GiB"
        )
    return Finding("memory", text)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free / GIB  # noqa: S108 - the space for collectives is looked at, no file is made
    except OSError:
        return Finding("shared memory", "there is no /dev/shm: NCCL between local ranks is slower")
    fix = "make /dev/shm larger (docker run --shm-size=1g)" if free < MIN_SHARED_GIB else ""
    return Finding(name="shared memory", text=f"{free:.2f} GiB free in /dev/shm", fix=fix)


def _byte_code() -> Finding:
    if sys.dont_write_bytecode:
        text = "is not written (PYTHONDONTWRITEBYTECODE): modules that were never compiled import more slowly"
        return Finding("byte code", text)
    return Finding("byte code", "is written")


def _torch_problem() -> Finding | None:
    """Why torch cannot be imported; None if it can."""
    try:
        import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        reason = first_line(error)
        fix = "pip install torch (builds for each CUDA version: https://pytorch.org/get-started/locally)"
        return Finding(
            name="torch",
            text=f"cannot be imported: {reason}; GPUs and ranks are not checked",
            fix=fix,
        )
    return None


def _gpus() -> Iterator[Finding]:
    import torch  # late: `weft doctor` works without it

    if not torch.cuda.is_available():
        yield Finding("gpus", "none available to this build of torch: ranks compute on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Finding(name=f"gpu {index}", text=f"{torch.cuda.get_device_name(index)}, {memory}")


def _collective() -> Finding:
    """An all-reduce between two local processes over gloo."""
    from weft.run.run_ranks import run_ranks  # late: imports torch

    start = time.perf_counter()
    try:
        sums = run_ranks("dp2", _sum_of_ranks, transport="processes")
    except (WeftError, OSError, RuntimeError) as error:
        reason = first_line(error)
        fix = "check the firewall and GLOO_SOCKET_IFNAME"
        return Finding(name="ranks", text=f"two local ranks cannot communicate: {reason}", fix=fix)
    seconds = time.perf_counter() - start
    if sums != [1.0, 1.0]:
        return Finding(name="ranks", text=f"all_reduce of 0 and 1 gives {sums}", fix="update torch")
    return Finding(
        "ranks",
        f"all_reduce between two local processes: correct, {seconds:.1f} s with their start",
    )


def _sum_of_ranks(comm: Comm) -> float:
    import torch  # late: `weft doctor` works without it

    return float(comm.all_reduce(torch.tensor(float(comm.rank)), DP))
