"""`run_ranks`: call a function on every rank of a mesh, in threads or in processes, and return the results by rank."""

from __future__ import annotations

import functools
import io
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle  # noqa: TID251 - between this process and its own children
import torch

from weft.code.users_files import OWN_PACKAGES
from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld, world_type
from weft.core.mesh import Mesh
from weft.core.transports import PROCESS
from weft.errors import CommError, CommTimeout, RankError
from weft.run.failure import RankFailure, root_cause
from weft.run.fork_server import Job, fork_server
from weft.run.rank_threads import run_rank_threads

T = TypeVar("T")

PROCESSES = "processes"
LATE_AFTER_S = 10.0
COMM_SHARE = 0.8
"""Time-out of a collective, as a share of that of the run: it names the missing ranks before the
run is stopped.
"""

# Note [Functions sent to rank processes]
# pickle stores a function as the name of its module. That fails for lambdas, functions inside a test, and modules that
# cannot be imported by name in another process (pytest's importlib mode, a script that is `__main__`). cloudpickle sends
# such functions and classes by value. Functions of modules that can be imported it sends by name; here, everything in the
# top-level package of the function goes by value unless that package is installed, so that a rank process does not import
# test modules and their dependencies. Modules themselves always go by name.

INSTALLED = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def run_ranks(
    mesh: str | Mesh,
    fn: Callable[[Comm], T],
    *,
    transport: str = "threads",
    timeout_s: float = 60.0,
    takes_turns: bool = False,
) -> list[T]:
    """Call `fn(comm)` on every rank of `mesh` and return the results by rank.

    Every rank runs with one intra-op thread and denormals flushed to zero.

    Random state: every rank has a default generator of torch (CPU) of its own, in threads as in
    processes. It starts in the state of the caller's, and `torch.manual_seed` in `fn` seeds it
    alone. Rank threads share the generators of NumPy, of Python's `random` and of GPUs, which
    belong to the process: there, draw from an `np.random.Generator`, a `random.Random` or a
    `torch.Generator` of each rank.

    Args:
        mesh: `"pp2 tp2"`, or a Mesh.
        transport: "processes" over gloo, or "threads" of this process; or another transport
            between threads, by the name of its file in weft/comm.
        timeout_s: for the whole run; a collective waits at most four fifths of it.
        takes_turns: whether rank threads compute one at a time, which is faster for small models;
            see Note [Turns] in comm/threads.py.

    Raises:
        Exception: the first failing rank's own, with a note that names the rank and its
            coordinates.
        LaunchError: a transport of that name is not there.
        RankError: that exception cannot be pickled, or a rank process has ended without returning.
        CommTimeout: some ranks did not finish in time.
    """
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if transport in (PROCESS, PROCESSES):
        return _run_in_processes(shape, fn, timeout_s=timeout_s)
    world = world_type(transport)
    return _run_in_threads(shape, fn, world, timeout_s=timeout_s, takes_turns=takes_turns)


def _run_in_threads(
    mesh: Mesh,
    fn: Callable[[Comm], T],
    world_type: type[ThreadWorld],
    *,
    timeout_s: float,
    takes_turns: bool,
) -> list[T]:
    comm_timeout_s = COMM_SHARE * timeout_s
    world = world_type(
        mesh.size,
        timeout_s=comm_timeout_s,
        late_after_s=comm_timeout_s if takes_turns else LATE_AFTER_S,  # it may wait for its turn
        takes_turns=takes_turns,
    )

    def run_rank(rank: int) -> T:
        torch.set_flush_denormal(True)
        return fn(Comm(mesh, rank, world.transport(rank)))

    with one_intra_op_thread():
        run = run_rank_threads(run_rank, world, timeout_s=timeout_s)
    if run.failures:
        rank = root_cause(run.failures).rank
        error = run.errors[rank]
        error.add_note(f"raised by rank {rank} ({mesh.coord_text(rank)}) of mesh {mesh}")
        raise error
    if run.stacks:
        late = _late_error(mesh, run.stacks, timeout_s=timeout_s)
        world.fail(min(run.stacks), late)
        raise late
    return [run.results[rank] for rank in range(mesh.size)]


@contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """One intra-op thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads started from here on inherit it
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def arithmetic_of_ranks() -> Iterator[None]:
    """This thread computes like a rank inside the block: one intra-op thread, denormal numbers are
    zero. Afterwards denormal numbers are computed with, as in a new process.
    """
    with one_intra_op_thread():
        torch.set_flush_denormal(True)
        try:
            yield
        finally:
            torch.set_flush_denormal(False)


def _run_in_processes(mesh: Mesh, fn: Callable[[Comm], T], *, timeout_s: float) -> list[T]:
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(
            mesh,
            fn=pickle_function(fn),
            folder=folder,
            timeout_s=timeout_s,
            comm_timeout_s=COMM_SHARE * timeout_s,
            cwd=os.getcwd(),
            environ=dict(os.environ),
            path=tuple(sys.path),
            argv=tuple(sys.argv),
            random_state=torch.get_rng_state().numpy().tobytes(),
        )
        outcome = fork_server().run(job)
    if outcome.failures:
        raise _to_exception(root_cause(outcome.failures), mesh, outcome.stacks)
    if outcome.stacks:
        raise _late_error(mesh, outcome.stacks, timeout_s=timeout_s)
    return [cloudpickle.loads(outcome.results[rank]) for rank in range(mesh.size)]


def _to_exception(failure: RankFailure, mesh: Mesh, stacks: dict[int, str]) -> BaseException:
    """The exception of a rank process, with notes: its rank and traceback, and the stacks of ranks
    that wait for others.
    """
    where = mesh.coord_text(failure.rank)
    error: BaseException
    if failure.exception:
        error = cloudpickle.loads(failure.exception)
        error.add_note(f"raised by rank {failure.rank} ({where}) of mesh {mesh}:\n{failure.trace}")
    else:
        error = RankError(failure.rank, where, failure.trace or failure.text)
    if isinstance(error, CommError):
        _add_stacks(error, stacks)
    return error


def _late_error(mesh: Mesh, stacks: dict[int, str], *, timeout_s: float) -> CommTimeout:
    names: list[str] = [f"{rank} ({mesh.coord_text(rank)})" for rank in stacks]
    late = ", ".join(names)
    error = CommTimeout(f"rank {late} of mesh {mesh} did not finish within {timeout_s:g} s")
    _add_stacks(error, stacks)
    return error


def _add_stacks(error: BaseException, stacks: dict[int, str]) -> None:
    for rank, stack in stacks.items():
        error.add_note(f"rank {rank} is at:\n{stack}")


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with modules always by name, and with cached properties, which hold a lock
    before Python 3.12.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            return import_module, (obj.__name__,)
        if isinstance(obj, functools.cached_property):
            return _cached_property, (obj.func, obj.attrname)
        return super().reducer_override(obj)


def _cached_property(func: Callable[[Any], Any], name: str) -> functools.cached_property[Any]:
    made = functools.cached_property(func)
    made.attrname = name
    return made


def pickle_function(fn: Callable[..., object]) -> bytes:
    """`fn` as bytes for another process, see Note [Functions sent to rank processes]."""
    buffer = io.BytesIO()
    package = _package_by_value(fn)
    if package is not None:
        cloudpickle.register_pickle_by_value(package)
    try:
        _Pickler(buffer).dump(fn)
    finally:
        if package is not None:
            cloudpickle.unregister_pickle_by_value(package)
    return buffer.getvalue()


def _package_by_value(fn: Callable[..., object]) -> ModuleType | None:
    """The top-level package of the function, or None if it is installed or unknown."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__module__", None) or type(fn).__module__
    root = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    if root in (*OWN_PACKAGES, "__main__") or file is None:
        return None
    if any(folder in Path(file).parents for folder in INSTALLED):
        return None
    return sys.modules.get(root)
