"""Owns `run_ranks`: one function on every rank, results by rank, the first failure told with its coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.testing.processes import run_in_processes
from weft.testing.threads import run_in_threads

T = TypeVar("T")


def run_ranks(
    mesh: str | Mesh,
    fn: Callable[[Comm], T],
    *,
    transport: Literal["threads", "processes"] = "threads",
    timeout_s: float = 60.0,
) -> list[T]:
    """Call `fn(comm)` on every rank of `mesh` and return the results by rank.

    Every rank runs with one intra-op thread and denormals flushed.

    Args:
        mesh: `"pp2 tp2"`, or a Mesh.
        transport: "threads" of this process, or "processes" over gloo.
        timeout_s: for the whole run; an operation between ranks waits at most four fifths of it, so that it can say
            who did not come.

    Raises:
        Exception: the first failing rank's own, with a note that names the rank and its coordinates.
        CommTimeout: some ranks did not finish in time.
    """
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    play = run_in_threads if transport == "threads" else run_in_processes
    return play(shape, fn, timeout_s=timeout_s)
