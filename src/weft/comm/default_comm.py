"""The `Comm` of strategies used in a plain script: the one passed in, or the world of torch.distributed."""

from __future__ import annotations

import torch

from weft.comm.backends import policy_of
from weft.comm.comm import Comm
from weft.core.mesh import Axis, Mesh, axis_names


def comm_or_world(comm: Comm | None, *, axis: Axis, device: torch.device) -> Comm:
    """`comm`, or if it is None the world that the script initialised torch.distributed with, all of
    it along `axis`.

    Every call with None opens connections of its own; every rank must make the same calls in the
    same order.

    Raises:
        LaunchError: `comm` is None, and torch.distributed has not been initialised.
    """
    if comm is not None:
        return comm
    from weft.comm.group import planned_groups  # late: a comm has its own transport
    from weft.comm.process_groups import ProcessTransport

    transport = ProcessTransport.adopt(device=device)
    first_axis = axis_names(axis)[0]
    mesh = Mesh.parse(f"{first_axis}{transport.size}")
    if policy_of(device.type).connects_at_start:
        transport.connect_groups(planned_groups(mesh, transport.rank))
    return Comm(mesh, transport.rank, transport)


def script_comm(axis: Axis) -> Comm:
    """Over the world that the script initialised torch.distributed with, all of it along `axis`, for
    tensors on the CPU; without one, of this process alone.
    """
    from weft.comm.process_groups import script_world  # late, as above

    if script_world() is None:
        from weft.comm.threads import ThreadWorld  # late: most scripts have processes

        return Comm(Mesh.parse(""), 0, ThreadWorld(1).transport(0))
    return comm_or_world(None, axis=axis, device=torch.device("cpu"))
