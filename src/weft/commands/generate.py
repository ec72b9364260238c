"""Owns `weft generate`: what is asked for and the model that is meant, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.commands.console import print_messages, set_openmp_policy, show_help, wants_help
from weft.config import flags
from weft.config.checks import Check
from weft.config.run import Run
from weft.errors import Fault, UserError
from weft.generate.job import make_job
from weft.generate.request import Request, short_words
from weft.generate.subject import find_subject
from weft.train import preflight

USAGE = "RUN | CHECKPOINT | HF-FOLDER [--prompt TEXT] [--mesh tp2] [--key value ...]"
LINE = "write text with a trained model, on any layout of ranks"


def world_faults(run: Run) -> Iterator[Fault]:
    """The ranks that torchrun or Slurm has started are as many as the mesh has."""
    for fault in preflight.world_faults(run):
        yield replace(fault, fix=f"start {run.device_mesh.size} ranks, or choose another mesh")


SURROUNDINGS = (Check(("mesh",), world_faults), Check(("device",), preflight.device_faults))


def generate(words: Sequence[str]) -> int:
    """Write what a stored model writes."""
    if wants_help(words):
        return show_help(Request(), f"weft generate {USAGE}", LINE)
    if not words or words[0].startswith("--"):
        fix = 'for example weft generate runs/first --prompt "def "'
        raise UserError(
            Fault("weft generate", "no model is named", need="a run, a checkpoint or a folder first", fix=fix)
        )
    request = flags.read_config(short_words(list(words[1:])), Request)
    job = make_job(request, find_subject(words[0]), surroundings=SURROUNDINGS)
    print_messages(f"note: {note}" for note in (*job.notes(), *preflight.notes(job.run)))
    set_openmp_policy()
    from weft.generate.main import generate as write  # imports torch, and so comes after all checks

    return write(job)
