"""Owns how a plain script's strategies find the other ranks: by the Comm they are given, or in torch.distributed's world."""

from __future__ import annotations

import torch

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.core.mesh import Axis, Mesh, axis_names


def comm_or_world(comm: Comm | None, *, axis: Axis, device: torch.device) -> Comm:
    """`comm`, or else the world that the script has initialised torch.distributed with, all of it along `axis`.

    Every call with None makes connections of its own; every rank must make the same calls in the same order.

    Raises:
        LaunchError: there is no Comm, and torch.distributed has not been initialised.
    """
    if comm is not None:
        return comm
    transport = ProcessTransport.adopt(device=device)
    return Comm(Mesh.parse(f"{axis_names(axis)[0]}{transport.size}"), transport.rank, transport)
