"""Owns what stands between the command and the ranks: start or join them, and give the first one the journal."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from weft.config.run import Run
from weft.errors import EXIT_PREEMPTED
from weft.run.launch import join, launch
from weft.run.rank_setup import choose_device, open_comm
from weft.run.signals import StopRequest
from weft.run.world import World, detect
from weft.train.event_log import Journal
from weft.train.loop import GenerateText, train_on_ranks
from weft.train.start import check_start
from weft.view.live import open_view


def train(run: Run, *, generate_text: GenerateText | None = None) -> int:
    """Train on the ranks that torchrun or Slurm has started, or on local ones started here; the exit code.

    `generate_text` is called on every rank after the last step of a run with `sample`.
    """
    check_start(run)
    out, leave = Path(run.out) if run.out else None, StopRequest()
    main = partial(train_rank, run, leave, generate_text)
    world = detect(os.environ)
    if world is not None:
        return join(main, world, mesh=run.device_mesh, out=out)
    with leave if run.transport == "threads" else nullcontext():  # signals reach the main thread alone, no rank
        return launch(
            main,
            run.device_mesh.size,
            transport=run.transport,
            device=run.device,
            port=run.port,
            mesh=run.device_mesh,
            out=out,
        )


def train_rank(run: Run, leave: StopRequest, generate_text: GenerateText | None, world: World) -> None:
    """Entry point of one rank.

    Raises:
        SystemExit: 75 where it was asked to leave, and has saved.
    """
    device = choose_device(run.device, local_rank=world.local_rank, local_size=world.local_size)
    with leave, open_comm(world, run.device_mesh, device) as comm, open_journal(run, world) as journal:
        status = train_on_ranks(run, comm, journal, leave, generate_text=generate_text)
    if status == "stopped":
        raise SystemExit(EXIT_PREEMPTED)


def open_journal(run: Run, world: World) -> Journal:
    """The run folder and the view on rank 0, silence on the others."""
    if world.rank > 0:
        return Journal(None)
    return Journal(Path(run.out) if run.out else None, [open_view()])
