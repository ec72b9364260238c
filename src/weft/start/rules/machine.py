"""Rules of the machine of a run, before torch is imported: number of ranks, rendezvous port, device, compiler, memory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator

from weft.comm.interfaces import LOOPBACK
from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.core.transports import cpu_transport_faults
from weft.errors import Fault, LaunchError, counted
from weft.run.world import detect
from weft.start.environment import has_gpus, is_joining, no_gpu_faults
from weft.start.memory_bound import local_states, machine_bytes, num_local_ranks
from weft.view.quantity import memory

ELASTIC_FIX = "--run.elastic True for the best smaller layout"


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
        yield from no_gpu_faults()


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


def memory_faults(run: Run) -> Iterator[Fault]:
    """On CPUs, weights, gradients and optimizer states of the local ranks must not be larger than
    the machine's memory. All that a rank holds is measured where it is near that (memory_before.py).
    """
    if has_gpus(run.device):
        return
    zero = run.parallel.zero
    needed = local_states(run, zero)
    available = machine_bytes()
    if needed > available:
        yield Fault(
            "model",
            "parameters, gradients and optimizer states are larger than the memory of this machine",
            got=f"at least {memory(needed)} for {counted(num_local_ranks(run), 'rank')}",
            need=f"at most {memory(available)}",
            fix=_smaller(run, available),
        )


def _smaller(run: Run, available: float) -> str:
    """The least ZeRO stage with which the states fit, or what else makes them smaller."""
    for zero in range(run.parallel.zero + 1, 4):
        if local_states(run, zero) < available:
            return f"--parallel.zero {zero}, or fewer ranks on this machine"
    return "a smaller model, or more machines to shard it over: --parallel.zero 3, or tp and pp in --mesh"
