"""Launching local ranks as processes or threads, and joining the ranks that torchrun or Slurm has started."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weft.comm.interfaces import LOOPBACK, listen
from weft.comm.threads import ThreadWorld, world_type
from weft.core.mesh import Mesh
from weft.core.transports import PROCESS, TransportName
from weft.errors import EXIT_OK, CommError, Fault, LaunchError, first_line
from weft.run.agent import end_with_agent
from weft.run.devices import DeviceChoice, Starter, devices_of_local_ranks
from weft.run.failure import NO_LOCATION_KINDS, ErrorContext, describe_error, root_cause
from weft.run.private_folder import PrivateFolder
from weft.run.rank_setup import TIMEOUT_S, prepare_rank
from weft.run.rank_status import StatusBoard
from weft.run.rank_threads import ThreadWatch, end_without_stuck_threads, run_rank_threads
from weft.run.signals import SignalQueue
from weft.run.supervisor import RestartPolicy, SupervisedEnd, Supervisor
from weft.run.worker import (
    OrderlyEnd,
    WorkerProcess,
    exit_code_of,
    exit_now,
    run_worker,
    send_failure,
)
from weft.run.worker_group import WorkerGroup, fork_workers
from weft.run.world import Attempt, Restart, ThreadRendezvous, World

RankMain = Callable[[World], None]
SECONDARY_DELAY_S = 4.0


def ignore_board(path: Path) -> None:
    """Do nothing."""


def no_check() -> None:
    """Check nothing."""


def same_attempt(rank: int, attempt: Attempt) -> Attempt:
    """The attempt as it is."""
    return attempt


@dataclass(frozen=True)
class Supervision:
    """How local ranks are supervised. Rank threads are watched, and not started again.

    Attributes:
        timeout_s: time without progress after which a rank hangs; 0: automatic, see
            `weft.run.hang`.
        restarts: how often rank processes are started again after a failure.
        snapshots: whether rank processes may keep snapshots in memory.
        on_board: called with the path of the status board, once it exists.
        adapt_attempt: called in each rank process before anything else; injects faults in `weft
            chaos`.
        check_start: called before every start of rank processes; raises where they must not start.
    """

    timeout_s: float = 0.0
    restarts: int = 0
    snapshots: bool = False
    on_board: Callable[[Path], None] = ignore_board
    adapt_attempt: Callable[[int, Attempt], Attempt] = same_attempt
    check_start: Callable[[], None] = no_check


DEFAULT_SUPERVISION = Supervision()


def launch(
    main: RankMain,
    nproc: int,
    *,
    transport: TransportName = "process",
    device: DeviceChoice = "auto",
    port: int | None = None,
    mesh: Mesh | None = None,
    out: Path | None = None,
    supervision: Supervision = DEFAULT_SUPERVISION,
) -> int:
    """Call `main(world)` on `nproc` local ranks, and wait for them.

    Processes are forks of this one: call it from the main thread, before any tensor has been
    computed. When a rank fails or hangs or on Ctrl-C, all are ended; none is left when this
    function returns or raises, or this process is killed. After a failure they may be started
    again: then `world.attempt` says why.

    Args:
        device: validated before a rank starts, so that a missing GPU is one error.
        port: TCP port of the rendezvous, on loopback; None: a private file.
        mesh: for the coordinates in an error.
        out: run folder, for the traceback of an error.

    Returns:
        0, or 75 if ranks saved and stopped on SIGTERM, SIGHUP or SIGUSR1, or 143 if they stopped
        without saving, or 131 after SIGQUIT.

    Raises:
        RankError: the first failing rank's error.
        LaunchError: the ranks cannot be started.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    starter: Starter = "fork" if transport == PROCESS else "threads"
    devices = devices_of_local_ranks(device, nproc, starter)
    context = ErrorContext(mesh, out)
    if transport != PROCESS:
        threads = world_type(transport)(nproc, devices=devices, timeout_s=TIMEOUT_S)
        with PrivateFolder() as folder:
            return _launch_threads(
                main,
                threads,
                _open_board(folder, nproc, supervision),
                context,
                timeout_s=supervision.timeout_s,
            )
    with (
        SignalQueue() as signals,
        open_listener(port) as listener,
        PrivateFolder(in_memory=supervision.snapshots) as folder,
    ):
        board = _open_board(folder, nproc, supervision)
        policy = RestartPolicy(supervision.restarts)
        restart: Restart | None = None
        while True:
            supervision.check_start()
            # ranks that start again need the folder for their rendezvous
            if folder.renew():
                board = _open_board(folder, nproc, supervision)
            attempt_folder = folder.path / f"attempt{policy.num_done}"
            attempt_folder.mkdir()
            # a new one for each attempt: a rank of the one before that still ends cannot join this world
            nonce = secrets.token_hex(16)
            # no rank runs: what the ranks before wrote last would count for the new ones
            board.clear()
            forked = fork_workers(nproc, attempt_folder, mesh=mesh)
            if isinstance(forked, WorkerProcess):
                rank = forked.rank
                status = board.rank(rank)
                status.begin(attempt=policy.num_done)
                world = local_world(
                    rank, nproc, folder=attempt_folder, nonce=nonce, listener=listener
                )
                report = partial(send_failure, rank=rank, pipe=forked.pipe)
                attempt = Attempt(
                    status,
                    memory_folder=folder.memory_path,
                    restart=restart,
                    has_launcher=True,
                    report_error=report,
                )
                world = replace(world, attempt=supervision.adapt_attempt(rank, attempt))
                exit_now(run_worker(partial(_run_main, main, world), rank=rank, pipe=forked.pipe))
            supervisor = Supervisor(
                forked,
                signals,
                board,
                timeout_s=supervision.timeout_s,
                patience=policy.patience,
                mesh=mesh,
            )
            # no worker runs any more when it returns: the next ones may use the same GPUs
            end = _end_of(supervisor, may_restart=policy.allows)
            if not policy.allows(end):
                return _outcome(end, context)
            policy = policy.after(end)
            restart = _restart(end, policy, context, had_started=restart is not None)


def _open_board(folder: PrivateFolder, num_ranks: int, supervision: Supervision) -> StatusBoard:
    """The status board of the ranks, in the private folder of this launcher."""
    path = folder.path / "board"
    board = StatusBoard.create(path, num_ranks)
    supervision.on_board(path)
    return board


def join(
    main: RankMain,
    world: World,
    *,
    mesh: Mesh | None = None,
    out: Path | None = None,
    is_ending: Callable[[], bool] = bool,
) -> int:
    """Call `main(world)` in this process, which is one rank of an existing world; 0 when it has
    returned.

    torchrun and Slurm end all ranks when one ends. So a rank with a secondary failure, or with an
    error that rank 0 has too, waits SECONDARY_DELAY_S, in which it is usually ended, before it
    reports.

    Args:
        is_ending: whether this process was asked to end already; then it does not wait.

    Raises:
        RankError: what went wrong, with the coordinates of the rank that is lost, else of this one.
    """
    end_with_agent(os.environ)
    try:
        _run_main(main, world)
    except OrderlyEnd:
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) of user code is no success
        failure = describe_error(error, rank=world.rank, at_s=time.monotonic())
        is_repeated = failure.kind in NO_LOCATION_KINDS and world.rank > 0
        if (failure.kind == "secondary" or is_repeated) and not is_ending():
            time.sleep(SECONDARY_DELAY_S)
        context = ErrorContext(mesh, out)
        if failure.kind == "secondary" and isinstance(error, CommError) and error.missing:
            raise context.lost_rank(error.missing[0], failure) from error
        raise context.to_error(failure) from error
    return EXIT_OK


@contextmanager
def open_listener(port: int | None) -> Iterator[socket.socket | None]:
    """The socket on which rank 0's store will listen; opened before ranks start, so that one of two
    launches on a port starts none.

    Raises:
        LaunchError: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        listener = listen(LOOPBACK, port)
    except OSError as error:
        got = f"{port}: {error.strerror}"
        fix = "choose another --port, or leave it out for a private file"
        raise LaunchError(Fault("port", "cannot be opened", got=got, fix=fix)) from error
    with listener:
        yield listener


def local_world(
    rank: int, size: int, *, folder: Path, nonce: str, listener: socket.socket | None = None
) -> World:
    """The world of one of `size` local ranks; called in that rank.

    Args:
        folder: private, holds the store if there is no `listener`.
        nonce: random name of the world.
    """
    rendezvous = f"file://{folder}/store"
    file = None
    if listener is not None:
        rendezvous = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}"
        if rank == 0:
            file = os.dup(listener.fileno())
        # rank 0 has a copy, and no other rank may hold the port open when it ends
        listener.close()
    return World(
        rank,
        size,
        local_rank=rank,
        local_size=size,
        rendezvous=rendezvous,
        nonce=nonce,
        listener=file,
    )


def no_restart(end: SupervisedEnd) -> bool:
    """Never start the ranks again."""
    return False


def wait_for_workers(
    group: WorkerGroup, signals: SignalQueue, board: StatusBoard, *, context: ErrorContext
) -> int:
    """Supervise a group to its end; the exit code. Raises as `launch`."""
    supervisor = Supervisor(group, signals, board, mesh=context.mesh)
    return _outcome(_end_of(supervisor), context)


def _end_of(
    supervisor: Supervisor, *, may_restart: Callable[[SupervisedEnd], bool] = no_restart
) -> SupervisedEnd:
    """How the workers ended; none runs any more. If they are not started again, those that are left
    after a failure have some time to end by themselves.
    """
    try:
        end = supervisor.wait()
        if end.failure is not None and not may_restart(end):
            supervisor.terminate()
        return end
    finally:
        # also after an error of this process: no rank outlives it
        supervisor.group.kill()


def _outcome(end: SupervisedEnd, context: ErrorContext) -> int:
    if end.failure is not None:
        raise context.to_error(end.failure)
    return end.code


def _restart(
    end: SupervisedEnd, policy: RestartPolicy, context: ErrorContext, *, had_started: bool
) -> Restart:
    failure = end.failure
    assert failure is not None, "ranks are started again after a failure"
    return Restart(
        number=policy.num_done,
        most=policy.most,
        rank=failure.rank,
        reason=first_line(context.to_error(failure)),
        detected_s=end.detected_s,
        at_s=end.at_s,
        had_started=had_started or end.step > 0,
    )


def _run_main(main: RankMain, world: World) -> None:
    prepare_rank(world.local_size)
    main(world)


def _launch_threads(
    main: RankMain,
    threads: ThreadWorld,
    board: StatusBoard,
    context: ErrorContext,
    *,
    timeout_s: float,
) -> int:
    """Call `main` on rank threads, and wait for them; the exit code."""

    def run_rank(rank: int) -> int:
        status = board.rank(rank)
        status.begin(attempt=0)
        world = World(
            rank,
            threads.size,
            local_rank=rank,
            local_size=threads.size,
            rendezvous=ThreadRendezvous(threads),
            attempt=Attempt(status, has_launcher=True),
        )
        try:
            _run_main(main, world)
        except OrderlyEnd as end:
            return exit_code_of(end)
        return EXIT_OK

    watch = ThreadWatch(board, context.mesh, timeout_s=timeout_s)
    run = run_rank_threads(run_rank, threads, watch=watch)
    if run.stacks:
        end_without_stuck_threads()
    if run.failures:
        failure = root_cause(run.failures)
        raise context.to_error(failure) from run.errors.get(failure.rank)
    return max(run.results.values(), default=EXIT_OK)
