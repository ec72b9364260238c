"""Checks of the environment of a run before torch is imported: number of ranks, rendezvous port, device, cores."""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping

from weft.core.mesh import Mesh
from weft.errors import Fault, LaunchError, counted
from weft.run.node_folder import has_agent, has_keeper
from weft.run.world import JOB_VARIABLE, detect, num_cores

RANK_VARIABLES = ("RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
"""torchrun sets it to the value of its --max-restarts."""
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def is_first(env: Mapping[str, str], names: Iterable[str] = RANK_VARIABLES) -> bool:
    """Whether this process is the first rank (or starts all of them)."""
    for name in names:
        if name in env:
            return env[name] == "0"
    return True


def is_joining(env: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm has started the ranks; `world_faults` reports an incomplete
    environment.
    """
    try:
        return detect(env) is not None
    except LaunchError:
        return True


@functools.cache  # reading it parses all metadata of torch, several times a start
def torch_version() -> str:
    """The version of torch, without importing it."""
    return importlib.metadata.version("torch")


def no_gpu_faults() -> Iterator[Fault]:
    """Why ranks cannot have a GPU."""
    fix = "--device cpu, or auto"
    if torch_version().endswith("+cpu"):
        yield Fault("device", "this torch is built without CUDA", got="cuda", need="cpu", fix=fix)
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield Fault(
            "device", "CUDA_VISIBLE_DEVICES hides all GPUs", got="cuda", need="cpu", fix=fix
        )
    elif not any(glob.glob(pattern) for pattern in GPU_FILES):
        yield Fault("device", "there is no GPU", got="cuda", need="cpu", fix=fix)


def has_gpus(device: str) -> bool:
    """Whether ranks compute on GPUs, as far as can be seen without torch."""
    return device == "cuda" or (device == "auto" and not list(no_gpu_faults()))


def launcher_notes(
    port: int | None, memory_every: int | None, *, restarts: int | None
) -> Iterator[str]:
    """Keys without effect on ranks that torchrun or Slurm has started; the job files of `weft
    launch` start them again as often as `restarts` says.
    """
    if not is_joining(os.environ):
        return
    if port is not None:
        yield f"port {port} is not used: the launcher of the ranks has named their rendezvous"
    times = os.environ.get(MAX_RESTARTS_VARIABLE, "0")
    is_kept_by_agent = has_agent(os.environ)
    if memory_every and not is_kept_by_agent and not has_keeper(os.environ):
        yield (
            f"save.memory_every {memory_every} is not used: nothing keeps the memory of ranks that "
            "srun starts (`weft launch slurm` writes a job that does)"
        )
    elif memory_every and is_kept_by_agent and times == "0":
        yield (
            f"save.memory_every {memory_every} is of no use: torchrun starts the ranks again "
            "0 times (torchrun --max-restarts)"
        )
    if restarts is not None and times != str(restarts) and not os.environ.get(JOB_VARIABLE):
        yield (
            f"run.restarts {restarts} is not used: the launcher of the ranks starts them again "
            f"{times} times (torchrun --max-restarts; `weft launch slurm`)"
        )


def notes(mesh: Mesh, device: str) -> tuple[str, ...]:
    """Remarks on the environment that do not prevent the run."""
    num_cores_here = num_cores()
    size = mesh.size
    is_overloaded = device == "cpu" and size > num_cores_here
    if not is_overloaded or is_joining(os.environ):
        return ()
    cores = counted(num_cores_here, "core")
    as_many_ranks = counted(num_cores_here, "rank")
    return (f"{size} ranks share {cores}: correct, but slower than {as_many_ranks}",)
