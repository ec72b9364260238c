"""Owns what stands between the command and the ranks, and what a rank does from its first breath to its last."""

from __future__ import annotations

import os
import sys
from functools import partial

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.source import Source
from weft.generate.decode import Decoder
from weft.generate.fill import load_model
from weft.generate.job import Job
from weft.generate.show import Objects, Screen, to_stdout
from weft.generate.subject import Subject
from weft.generate.texts import Texts
from weft.hf.folder import HfFolder
from weft.run.launch import join, launch
from weft.run.rank_setup import choose_device, open_comm
from weft.run.world import World, detect
from weft.train.build import family_of


def generate(job: Job) -> int:
    """Write on the ranks that torchrun or Slurm has started, or on local ones started here; the exit code."""
    run, world = job.run, detect(os.environ)
    if world is not None:
        return join(partial(generate_rank, job), world, mesh=run.device_mesh)
    return launch(
        partial(generate_rank, job),
        run.device_mesh.size,
        transport=run.transport,
        device=run.device,
        mesh=run.device_mesh,
    )


def generate_rank(job: Job, world: World) -> None:
    """One rank; the first one shows what all of them write."""
    run = job.run
    device = choose_device(run.device, local_rank=world.local_rank, local_size=world.local_size)
    with open_comm(world, run.device_mesh, device) as comm:
        model = load_model(family_of(run), job.config, open_source(job.subject), plan=job.plan, comm=comm)
        texts = Texts(job)
        show = view_of(job, texts).update if world.rank == 0 else lambda: None
        for _ in texts.written(Decoder(model, vocab=job.config.axis_sizes()["vocab"])):
            show()
            comm.checked = False  # every further token repeats the same operations
        if world.rank == 0:
            sys.stderr.write("".join(f"{line}\n" for line in texts.summary()))


def view_of(job: Job, texts: Texts) -> Screen | Objects:
    """How the texts are to be seen."""
    if job.request.format == "json":
        facts = {"model": str(job.subject.path), "seed": job.request.seed}
        return Objects(texts.shown(), write=to_stdout, facts=facts)
    return Screen(texts.shown(), write=to_stdout, is_terminal=sys.stdout.isatty())


def open_source(subject: Subject) -> Source:
    """The stored parameters."""
    if subject.kind == "hf":
        return HfFolder(subject.path, subject.run.model)
    return open_checkpoint(subject.path).section("model")
