"""A rank of torchrun or Slurm: it reports its status, looks for hung peers, and ends after a verdict on one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import NoReturn

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED
from weft.run.agent import restart_number
from weft.run.launch import join
from weft.run.node_folder import has_node_folder, node_name, open_node_folder, remove_node_folder
from weft.run.peer_watch import PeerFailure, PeerWatch
from weft.run.rank_status import StatusBoard
from weft.run.worker import OrderlyEnd
from weft.run.world import Attempt, World
from weft.start.end_event import RecordFolder
from weft.train.event_log import EventLog, end_run_of_dead_writer

MAX_DOUBLINGS = 6
"""Of the time that a rank may pause, one a restart: the agent does not say why it has restarted."""

Watch = Callable[[Comm, EventLog], AbstractContextManager[object]]
"""Opened while a rank trains."""


def run_joined(
    main: Callable[[Watch, World], None],
    world: World,
    *,
    mesh: Mesh,
    records: RecordFolder,
    timeout_s: float,
    takes_snapshots: bool,
    is_ending: Callable[[], bool],
) -> int:
    """Call `main` as one rank of an existing world; 0 when it has returned. Raises as `join`.

    Args:
        timeout_s: see `PeerWatch`.
        takes_snapshots: whether ranks keep snapshots in the memory of their nodes, where an agent
            of torchrun or a keeper (Slurm) outlives them.
        is_ending: whether this process was asked to end.
    """
    board = StatusBoard.in_memory(1)
    status = board.rank(0)
    num_restarts = restart_number(os.environ)
    status.begin(attempt=num_restarts)

    def watch(comm: Comm, log: EventLog) -> PeerWatch:
        assert isinstance(comm.transport, ProcessTransport), "joined ranks are processes"
        return PeerWatch(
            comm.transport.store,
            world.rank,
            mesh,
            board,
            timeout_s=timeout_s,
            patience=2 ** min(num_restarts, MAX_DOUBLINGS),
            on_verdict=partial(end_rank, records, log),
        )

    attempt = Attempt(status, num_restarts=num_restarts)
    if takes_snapshots and has_node_folder(os.environ) and records.out is not None:
        folder = open_node_folder(os.environ, records.out)
        attempt = replace(attempt, memory_folder=folder, node=node_name())
    try:
        code = join(
            partial(main, watch),
            replace(world, attempt=attempt),
            mesh=mesh,
            out=records.out,
            is_ending=is_ending,
        )
    except OrderlyEnd:  # saved and stopped on request
        remove_node_folder(attempt.memory_folder)
        raise
    remove_node_folder(attempt.memory_folder)
    return code


def end_rank(records: RecordFolder, log: EventLog, verdict: PeerFailure, is_own: bool) -> NoReturn:
    """End this process because a rank is hung. The rank that has found it prints the error; the
    `end` event is written, and copied, by rank 0, or if rank 0 is the one that hangs, after its
    death.
    """
    if is_own:
        sys.stderr.write(f"error: {verdict.text}\n")
        sys.stderr.flush()
    has_written = False
    if log.out is not None:
        log.end("failed", error=verdict.text)
        has_written = True
    elif is_own and verdict.rank == 0 and records.out is not None:
        has_written = end_run_of_dead_writer(records.out, error=verdict.text)
    if has_written:
        records.copy()
    os._exit(EXIT_FAILED)
