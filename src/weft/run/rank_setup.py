"""Set-up of one rank: its communicator, and the settings of its threads, numerics and memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import torch

from weft.comm.backends import policy_of
from weft.comm.comm import Comm
from weft.comm.group import StepGroups, planned_groups
from weft.comm.interfaces import LOOPBACK, address_toward
from weft.comm.observe import Observer
from weft.comm.process_groups import ProcessTransport
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import Fault, LaunchError, counted
from weft.run.devices import check_exclusive, gpu_uuid
from weft.run.world import ThreadRendezvous, World, num_cores

TIMEOUT_S = 600.0
"""Default time-out of a collective."""

# Note [Memory of a rank]
# glibc maps and unmaps every block of 32 MB or more, and returns the top of the heap to the system: each step faults its
# pages in anew. The settings of `keep_freed_memory` have the effect of the environment variables MALLOC_MMAP_THRESHOLD_,
# MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_, without a restart of the process. Measured, GPT of 10.7 M parameters, 8,192
# tokens a step, 1 thread:
#
#     default             1,190 tokens/s     228,000 page faults a step    1.89 GB peak
#     variables           1,276               12,000                        1.96
#     keep_freed_memory   1,269               13,000                        1.99

M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
MAX_INT = 2**31 - 1
PAD_BYTES = 2**28


@contextmanager
def open_comm(
    world: World,
    mesh: Mesh,
    device: torch.device,
    *,
    observers: Sequence[Observer] = (),
    timeout_s: float = TIMEOUT_S,
    deterministic: bool = False,
    steps: StepGroups | None = None,
) -> Iterator[Comm]:
    """The communicator of this rank over `mesh`; its connections are closed on exit.

    Args:
        deterministic: whether GPUs reduce in rank order, as CPUs do, instead of by NCCL.
        steps: as in `planned_groups`.

    Raises:
        LaunchError: the world size differs from the mesh size, the rendezvous fails, or two ranks
            have the same GPU.
    """
    if world.size != mesh.size:
        raise LaunchError(size_fault(world, mesh))
    if isinstance(world.rendezvous, ThreadRendezvous):
        threads = world.rendezvous.threads
        assert isinstance(threads, ThreadWorld), "rank threads share a ThreadWorld"
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        yield Comm(
            mesh,
            world.rank,
            threads.transport(world.rank),
            observers=tuple(observers),
            monitor=world.attempt.status if world.attempt else None,
        )
        return
    transport = ProcessTransport(
        world.rank,
        world.size,
        world.rendezvous,
        device=device,
        timeout_s=timeout_s,
        job=world.job,
        nonce=world.nonce,
        address=own_address(world),
        listener=world.listener,
        deterministic=deterministic,
    )
    try:
        if device.type == "cuda":
            # before communicators are made: NCCL would wait, or fail with another text, where two ranks share a GPU
            check_exclusive(transport, gpu_uuid(device))
        if policy_of(device.type).connects_at_start:
            groups = planned_groups(mesh, world.rank, steps=steps)
            transport.connect_groups(groups)
        yield Comm(
            mesh,
            world.rank,
            transport,
            observers=tuple(observers),
            monitor=world.attempt.status if world.attempt else None,
        )
    except BaseException:
        # aborts what is under way: the others fail instead of waiting
        transport.close()
        raise
    transport.close(is_orderly=True)


def own_address(world: World) -> str | None:
    """The address on which the data connections of this rank listen; None: gloo's own choice."""
    if world.is_on_one_machine:
        return LOOPBACK
    url = urlsplit(str(world.rendezvous))
    host = url.hostname or os.environ.get("MASTER_ADDR", "")
    port = url.port or int(os.environ.get("MASTER_PORT", "0"))
    return address_toward(host, port) if host else None


def size_fault(world: World, mesh: Mesh) -> Fault:
    """The world has more or fewer ranks than the mesh."""
    return Fault(
        "mesh",
        "differs from the world size",
        got=counted(world.size, "rank"),
        need=f"{mesh.size} for {str(mesh)!r}",
        fix=f"start {counted(mesh.size, 'rank')}, or choose a mesh of {world.size} such as dp{world.size}",
    )


def prepare_rank(local_size: int) -> None:
    """Set up this process (or thread) to compute as one of `local_size` ranks of this machine.

    The cores are divided among the ranks unless OMP_NUM_THREADS is set; denormals are flushed to
    zero.
    """
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_size))
    # per thread: ranks that are threads each set it, and threads that they start inherit it
    torch.set_flush_denormal(True)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for later steps; see Note [Memory of a rank]."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if not mallopt(M_MMAP_THRESHOLD, MAX_INT):
        mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, MAX_INT)
    mallopt(M_TOP_PAD, PAD_BYTES)
