"""Checks of the environment of a run before torch is imported: number of ranks, rendezvous port, device, cores."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping

from weft.comm.interfaces import LOOPBACK
from weft.core.mesh import Mesh
from weft.core.transports import cpu_transport_faults
from weft.errors import Fault, LaunchError, counted
from weft.run.node_folder import has_agent, has_keeper
from weft.run.world import JOB_VARIABLE, detect, num_cores

RANK_VARIABLES = ("RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
"""torchrun sets it to the value of its --max-restarts."""
ELASTIC_FIX = "--run.elastic True for the best smaller layout"
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


def world_faults(mesh: Mesh, nproc: int | None, *, is_elastic: bool = False) -> Iterator[Fault]:
    """The number of ranks, started or requested, must be the size of the mesh."""
    size = mesh.size
    if mesh.text:
        need = f"{size} for {mesh.text!r}"
    else:
        need = "1 without a mesh"
    try:
        world = detect(os.environ)
    except LaunchError as error:
        yield from error.faults
        return
    if world:
        started = str(world.size)
    else:
        started = os.environ.get("WORLD_SIZE", str(size))
    if started != str(size):
        got = f"WORLD_SIZE={started}"
        if world:
            got = f"{counted(world.size, 'rank')} started"
        ranks = counted(size, "rank")
        fix = f"start {ranks}, or choose a mesh of {started} such as --mesh dp{started}"
        if started.isdecimal() and int(started) < size and not is_elastic:
            fix += f", or {ELASTIC_FIX}"
        yield Fault("mesh", "differs from the world size", got=got, need=need, fix=fix)
    is_shrunk = world is not None and is_elastic
    if nproc is not None and nproc != size and not is_shrunk:
        fix = f"--nproc {size}, or a mesh of {nproc} such as --mesh dp{nproc}"
        if nproc < size and not is_elastic and world is None:
            fix += f", or {ELASTIC_FIX}"
        yield Fault("nproc", "differs from the mesh", got=f"{nproc}", need=need, fix=fix)


def transport_faults(transport: str) -> Iterator[Fault]:
    """Ranks that torchrun or Slurm has started are processes; the environment names a transport that is there."""
    yield from cpu_transport_faults()
    if transport != "process" and is_joining(os.environ):
        what = "ranks as threads cannot be started by torchrun or Slurm"
        yield Fault("transport", what, got=transport, need="process", fix="--transport process")


def port_faults(port: int | None) -> Iterator[Fault]:
    """The rendezvous port must be free; only the process that opens it checks."""
    if port is None or is_joining(os.environ):
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError as error:
            fix = "choose another --port, or leave it out for a free one"
            yield Fault(
                "port",
                "cannot be opened",
                got=f"{port}: {error.strerror}",
                need="a free port",
                fix=fix,
            )


def device_faults(device: str) -> Iterator[Fault]:
    """If cuda is requested there must be a GPU, as far as can be seen without torch."""
    if device == "cuda":
        yield from _no_gpu_faults()


def _no_gpu_faults() -> Iterator[Fault]:
    """Why ranks cannot have a GPU."""
    fix = "--device cpu, or auto"
    if importlib.metadata.version("torch").endswith("+cpu"):
        yield Fault("device", "this torch is built without CUDA", got="cuda", need="cpu", fix=fix)
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield Fault(
            "device", "CUDA_VISIBLE_DEVICES hides all GPUs", got="cuda", need="cpu", fix=fix
        )
    elif not any(glob.glob(pattern) for pattern in GPU_FILES):
        yield Fault("device", "there is no GPU", got="cuda", need="cpu", fix=fix)


def has_gpus(device: str) -> bool:
    """Whether ranks compute on GPUs, as far as can be seen without torch."""
    return device == "cuda" or (device == "auto" and not list(_no_gpu_faults()))


def compiler_faults(compile_blocks: str, device: str) -> Iterator[Fault]:
    """Blocks that are compiled need a C++ compiler on the CPU, and Triton on GPUs."""
    fix = "--compile off"
    if has_gpus(device):
        if compile_blocks != "off" and importlib.util.find_spec("triton") is None:
            yield Fault("compile", "needs triton on GPUs", got=compile_blocks, need="off", fix=fix)
    elif compile_blocks == "blocks":
        program = os.environ.get("CXX", "g++")
        if shutil.which(program) is None:
            what = f"needs a C++ compiler, and there is no {program}"
            fix = f"install {program}, set CXX, or {fix}"
            yield Fault("compile", what, got=compile_blocks, need="off", fix=fix)


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
