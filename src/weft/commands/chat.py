"""`weft chat`: reads and checks the options and the model source before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from weft.commands.console import check_files, show_help, wants_help
from weft.commands.generate import check_weights
from weft.config.command_options import read_options
from weft.errors import Fault, counted
from weft.generate.conversation import make_chat_job
from weft.generate.model_source import only_model
from weft.generate.request import ChatRequest
from weft.run.world import detect
from weft.start import environment
from weft.start.checked_run import set_openmp_policy
from weft.start.messages import print_messages
from weft.start.rules import machine

USAGE = "RUN | CHECKPOINT | HF-FOLDER [--system TEXT] [--mesh tp2] [--key value ...]"
LINE = "a conversation with a trained model, in the terminal or line by line from stdin"


def _environment_faults(request: ChatRequest) -> Iterator[Fault]:
    """torchrun or Slurm has started ranks, or there is no GPU."""
    world = detect(os.environ)
    if world is not None and world.size > 1:
        yield Fault(
            "weft chat",
            "starts its ranks itself, in one process",
            got=f"{counted(world.size, 'rank')} started by torchrun or Slurm",
            fix="start it once, and name its ranks by --mesh",
        )
    yield from machine.device_faults(request.device)


def chat(words: Sequence[str]) -> int:
    """Hold a conversation with a stored model."""
    if wants_help(words):
        return show_help(ChatRequest(), f"weft chat {USAGE}", LINE)
    request, places = read_options(words, ChatRequest)
    check_files(request, "json")
    source = only_model(places, "weft chat", example="--chat_template chatml")
    job = make_chat_job(request, source, _environment_faults(request))
    check_weights(job)
    notes = (*source.plain_notes, *environment.notes(request.device_mesh, request.device))
    print_messages(f"note: {note}" for note in notes)
    set_openmp_policy()
    from weft.generate.chat_session import (
        chat as chat_on_ranks,
    )  # late: imports torch, after all checks

    return chat_on_ranks(job)
