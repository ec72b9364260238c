"""Owns how a rank gets its `Comm`: over gloo or NCCL between processes, through memory between threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.comm.comm import Comm
from weft.comm.observe import Observer
from weft.comm.process_groups import ProcessTransport
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import Fault, LaunchError
from weft.run.world import Memory, World

TIMEOUT_S = 600.0
"""How long a rank waits for the others."""


@contextmanager
def open_comm(
    world: World,
    mesh: Mesh,
    device: torch.device,
    *,
    observers: Sequence[Observer] = (),
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Comm]:
    """The communicator of this rank over `mesh`; its connections are dropped at the end.

    Raises:
        LaunchError: the world is not as large as the mesh, or the ranks have nowhere to meet.
    """
    if world.size != mesh.size:
        raise LaunchError(size_fault(world, mesh))
    if isinstance(world.rendezvous, Memory):
        assert isinstance(world.rendezvous.threads, ThreadWorld), "ranks in memory share a ThreadWorld"
        yield Comm(mesh, world.rank, world.rendezvous.threads.transport(world.rank), observers=tuple(observers))
        return
    transport = ProcessTransport(world.rank, world.size, world.rendezvous, device=device, timeout_s=timeout_s)
    try:
        yield Comm(mesh, world.rank, transport, observers=tuple(observers))
    finally:
        transport.close()


def size_fault(world: World, mesh: Mesh) -> Fault:
    """What to say where the ranks that are there are not those of the mesh."""
    fix = f"start {mesh.size} ranks, or choose a mesh of {world.size} such as dp{world.size}"
    return Fault("mesh", "differs from the world size", f"{world.size} ranks", f"{mesh.size} for {str(mesh)!r}", fix)
