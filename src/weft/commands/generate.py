"""`weft generate`: reads and checks the request and the model source before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.checkpoint.data_file import check_stored_bytes
from weft.commands.console import check_files, show_help, wants_help
from weft.config.command_options import read_options
from weft.errors import Fault, UserError, counted
from weft.generate.job import ModelJob, make_job
from weft.generate.model_source import only_model
from weft.generate.request import Request
from weft.hf.folder_checks import weight_faults
from weft.start import environment
from weft.start.checked_run import set_openmp_policy
from weft.start.messages import print_messages
from weft.start.rules import machine

USAGE = "RUN | CHECKPOINT | HF-FOLDER [--prompt TEXT] [--mesh tp2] [--key value ...]"
LINE = "generate text with a trained model, on any layout of ranks"


def environment_faults(request: Request) -> Iterator[Fault]:
    """torchrun or Slurm has started another number of ranks than the mesh has; there is no GPU."""
    mesh = request.device_mesh
    ranks = counted(mesh.size, "rank")
    for fault in machine.world_faults(mesh, None):
        yield replace(fault, fix=f"start {ranks}, or choose another mesh")
    yield from machine.device_faults(request.device)


def check_weights(job: ModelJob) -> None:
    """Check the files of the stored parameters.

    Raises:
        UserError: one is missing, of another size, or of another model.
    """
    if job.source.kind == "checkpoint":
        check_stored_bytes(job.source.path)
        return
    faults = tuple(weight_faults(job.source.path, job.config))
    if faults:
        raise UserError(*faults)


def generate(words: Sequence[str]) -> int:
    """Generate text with a stored model."""
    if wants_help(words):
        return show_help(Request(), f"weft generate {USAGE}", LINE)
    request, places = read_options(words, Request)
    check_files(request, "json")
    source = only_model(places, "weft generate", example='--prompt "def "')
    job = make_job(request, source, other_faults=environment_faults(request))
    check_weights(job)
    notes = (*job.notes(), *environment.notes(request.device_mesh, request.device))
    print_messages(f"note: {note}" for note in notes)
    set_openmp_policy()
    from weft.generate.main import (
        generate as generate_on_ranks,
    )  # late: imports torch, after all checks

    return generate_on_ranks(job)
