"""`weft train`: start or join the ranks, and run the training loop on each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from weft.checkpoint.folder import checkpoints
from weft.config.run import Run
from weft.errors import EXIT_PREEMPTED, RankError
from weft.parallel.model.parallelize import ParallelModel
from weft.run.folder_lock import heartbeat
from weft.run.launch import join, launch
from weft.run.rank_setup import choose_device, open_comm
from weft.run.signals import StopRequest
from weft.run.world import World, detect
from weft.train.build import build_training, check_initial_parameters
from weft.train.event_log import EventLog, append_end_event
from weft.train.loop import Event, resume_command, run_training
from weft.view.live import open_view

PROMPT = "def "

GenerateText = Callable[[Run, ParallelModel, str], str]
"""(run, the trained model, a prompt) -> `run.sample` tokens of text; called on every rank, equal on
every rank.
"""


def train(run: Run, *, generate_text: GenerateText | None = None) -> int:
    """Train on the ranks that torchrun or Slurm has started, or on local ones started here; returns
    the exit code.

    `generate_text` is called on every rank after the last step of a run with `sample`.
    """
    check_initial_parameters(run)
    out = Path(run.out) if run.out else None
    stop_request = StopRequest()
    main = partial(train_rank, run, stop_request, generate_text)
    world = detect(os.environ)
    if world is not None:
        return join(main, world, mesh=run.device_mesh, out=out)
    with (
        _end_event(out),
        stop_request if run.transport == "threads" else nullcontext(),
    ):  # for the main thread only
        return launch(
            main,
            run.device_mesh.size,
            transport=run.transport,
            device=run.device,
            port=run.port,
            mesh=run.device_mesh,
            out=out,
        )


@contextmanager
def _end_event(out: Path | None) -> Iterator[None]:
    """After the ranks have ended, append the `end` event that a killed rank 0 could not write, or
    put the root cause into that of a rank 0 that failed because another rank did.

    Raises:
        RankError: the error of the ranks, with the command to resume or to start again.
    """
    if out is None:
        yield
        return
    start_s = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        append_end_event(out, "interrupted", seconds=time.perf_counter() - start_s)
        raise
    except RankError as error:
        advised = _with_next_command(error, out)
        append_end_event(
            out,
            "failed",
            error=str(advised),
            seconds=time.perf_counter() - start_s,
        )
        raise advised from error.__cause__
    # Ended by SIGTERM without an error; no effect after a normal end.
    append_end_event(out, "interrupted", seconds=time.perf_counter() - start_s)


def _with_next_command(error: RankError, out: Path) -> RankError:
    """The error with the command that resumes the run, or starts it again without a checkpoint."""
    if error.kind != "failure" or not (out / "run.toml").is_file():
        return error
    has_checkpoint = next(checkpoints(out), None) is not None
    label = "resume" if has_checkpoint else "no checkpoint; start again"
    return RankError(
        error.rank,
        error.where,
        f"{error.message}\n  {label}: {resume_command(out)}",
        kind=error.kind,
    )


def train_rank(
    run: Run,
    stop_request: StopRequest,
    generate_text: GenerateText | None,
    world: World,
) -> None:
    """Entry point of one rank.

    Raises:
        SystemExit: with code 75, if the run was asked to stop and has saved.
    """
    device = choose_device(
        run.device,
        local_rank=world.local_rank,
        local_size=world.local_size,
    )
    with (
        stop_request,
        open_comm(world, run.device_mesh, device) as comm,
        open_event_log(run, world) as log,
        heartbeat(log.out),
    ):
        training = build_training(run, comm, stop_requested=lambda: stop_request.requested)
        outcome = run_training(
            training, log, at_end=_sample_event(run, training.step.model, generate_text)
        )
    if outcome == "stopped":
        raise SystemExit(EXIT_PREEMPTED)


def open_event_log(run: Run, world: World) -> EventLog:
    """The run folder and the view on rank 0; an event log without outputs on other ranks."""
    if world.rank > 0:
        return EventLog(None)
    return EventLog(Path(run.out) if run.out else None, [open_view()])


def _sample_event(
    run: Run, model: ParallelModel, generate_text: GenerateText | None
) -> Callable[[], Event] | None:
    """Returns the `sample` event of a run with `sample`; every rank must call it."""
    if not run.sample or generate_text is None:
        return None

    def sample_event() -> Event:
        return {"event": "sample", "prompt": PROMPT, "text": generate_text(run, model, PROMPT)}

    return sample_event
