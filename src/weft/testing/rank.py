"""Owns what one rank does in a process of its own: join the world, call the function, say how it ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.core.mesh import Mesh
from weft.errors import CommError, RankError
from weft.testing.carry import pack, unpack


@dataclass(frozen=True)
class Job:
    """What all ranks of one run are told."""

    mesh: Mesh
    fn: bytes
    folder: str
    timeout_s: float
    comm_timeout_s: float
    cwd: str
    environ: dict[str, str]
    path: tuple[str, ...]
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `value` packed, or `error` packed, or neither where it died without a word.

    `notes` are those of the error: an error with a `__reduce__` of its own loses them on the way.
    """

    rank: int
    at_s: float
    value: bytes | None = None
    error: bytes | None = None
    notes: tuple[str, ...] = ()
    is_comm_error: bool = False
    exit_code: int | None = None


def play(rank: int, job: Job, pipe: Connection) -> None:
    """Be `rank` of `job`, in a fresh process, and put an Outcome into `pipe`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked for the run decides
    stacks = os.open(f"{job.folder}/stack-{rank}", os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.environ)
    sys.path[:], sys.argv[:] = job.path, job.argv
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    pipe.send(_outcome(rank, job))


def _outcome(rank: int, job: Job) -> Outcome:
    where = job.mesh.coord_text(rank)
    try:
        store = f"file://{job.folder}/store"
        transport = ProcessTransport(rank, job.mesh.size, store, timeout_s=job.comm_timeout_s)
        value = unpack(job.fn)(Comm(job.mesh, rank, transport))
        return Outcome(rank, time.monotonic(), value=pack(value))
    except BaseException as error:  # noqa: BLE001 - raised again in the process that asked for the run
        at_s = time.monotonic()
        error.add_note(f"raised by rank {rank} ({where}) of mesh {job.mesh}:\n{traceback.format_exc()}")
        is_comm_error, packed = isinstance(error, CommError), _packed(error, rank, where)
        return Outcome(rank, at_s, error=packed, notes=tuple(error.__notes__), is_comm_error=is_comm_error)


def _packed(error: BaseException, rank: int, where: str) -> bytes:
    try:
        data = pack(error)
        unpack(data)
    except Exception:  # noqa: BLE001 - an error that cannot travel is told in words
        return pack(RankError(rank, where, "".join(traceback.format_exception(error))))
    return data
