"""Owns the commands: `weft NAME [CONFIG.toml] [--a.b value ...]`; every check is made before torch is imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import Field

from weft import __version__
from weft.commands import data_checks
from weft.commands import doctor as commands_doctor
from weft.commands import schedule as commands_schedule
from weft.commands.console import (
    HELP,
    load_checked_run,
    print_messages,
    print_result,
    set_openmp_policy,
    show_help,
    take_flag,
    wants_help,
)
from weft.config import flags
from weft.config.load import try_load
from weft.config.run import plan_of
from weft.config.schema import ConfigSection
from weft.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USER,
    Fault,
    RankError,
    UserError,
    WeftError,
    did_you_mean,
)
from weft.layout.explain import explain as explain_plan
from weft.models import FAMILIES
from weft.train import adapter_base, preflight, resume

CONFIG_USAGE = "[CONFIG.toml] [--key value ...]"
PATIENCE_S = 1.0
"""torchrun ends all ranks with the first that ends: the others wait until the first on their machine has told its faults."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 ok, 1 failed, 2 the user can mend it, 130 Ctrl-C."""
    name, *words = (list(sys.argv[1:]) if argv is None else list(argv)) or ["--help"]
    try:
        code = _command(name)(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `weft train --help | head`: nobody reads on, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except UserError as error:
        print_messages(f"error: {fault}" for fault in error.faults)
        if not preflight.is_first(os.environ, preflight.LOCAL_RANKS):
            time.sleep(PATIENCE_S)
        return EXIT_USER
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)  # nobody but this rank, or the parent of all, knows of it
        return EXIT_USER if error.kind == "user" else EXIT_FAILED
    except WeftError as error:
        print_messages([f"error: {error}"])
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in HELP:
        return lambda _words: print_result(overview())
    if name == "--version":
        return lambda _words: print_result(f"weft {__version__}")
    if name in COMMANDS:
        return COMMANDS[name].run
    if name in COMMANDS_TO_COME:
        fix = f"these are: {', '.join(COMMANDS)}"
        raise UserError(Fault(f"weft {name}", "is not there yet", fix=fix))
    raise UserError(Fault("weft", f"unknown command {name!r}", fix=did_you_mean(name, COMMANDS)))


def overview() -> str:
    """All commands, one line each."""
    lines = [f"  weft {name:<9} {command.usage:<32} {command.line}" for name, command in COMMANDS.items()]
    head = ["weft trains one model on many devices.", "", *lines, ""]
    codes = "Exit code 0: ok, 1: failed, 2: yours to mend, 75: stopped and saved."
    return "\n".join([*head, f"weft NAME --help tells a command's keys. {codes}"])


def train(words: Sequence[str]) -> int:
    """Check everything that can be checked, then train."""
    if wants_help(words):
        return _help_of_run("train", words)
    run = load_checked_run(words, (*data_checks.CHECKS, *preflight.CHECKS, *resume.CHECKS, *adapter_base.CHECKS))
    if not run.out:
        run = run.model_copy(update={"out": str(preflight.fresh_out(run, datetime.now()))})
    print_messages(f"note: {note}" for note in preflight.notes(run))
    set_openmp_policy()
    from weft.generate.main import sample_trained  # late: they import torch, after all checks
    from weft.train.main import train as train_run

    return train_run(run, generate_text=sample_trained)


def explain(words: Sequence[str]) -> int:
    """Print the layout that a config asks for, and why it is so."""
    if wants_help(words):
        return _help_of_run("explain", words)
    return print_result(explain_plan(plan_of(load_checked_run(words))))


def simulate_run(words: Sequence[str]) -> int:
    """Draw the pipeline of a config as the simulator runs it."""
    if wants_help(words):
        return _help_of_run("simulate", words)
    return commands_schedule.simulate_run(words)


def schedule(words: Sequence[str]) -> int:
    """Draw a schedule at unit costs."""
    if wants_help(words):
        return commands_schedule.help_of_schedule()
    return commands_schedule.schedule(words)


class Proving(ConfigSection):
    """What `weft prove` compares, besides a run folder or the keys of a run."""

    first: int = Field(3, ge=1, description="steps to compare, from the first")


def prove(words: Sequence[str]) -> int:
    """Hold a run, or a config before it runs, against one device; exit code 1 where they differ."""
    command = COMMANDS["prove"]
    if wants_help(words):
        return show_help(
            Proving(), f"weft prove {command.usage}", f"{command.line}. Without a folder: any key of weft train"
        )
    flag, rest = take_flag("--first", words)
    first = flags.read_config(flag, Proving).first
    folder = Path(rest[0]) if rest and Path(rest[0]).is_dir() else None
    if folder is not None and len(rest) > 1:
        raise UserError(Fault("weft prove", "a run folder takes no keys: it has its own", got=" ".join(rest[1:])))
    subject = folder or load_checked_run(rest, data_checks.CHECKS)
    set_openmp_policy()
    from weft.prove.command import Proof  # imports torch, and so comes after all checks

    proof = Proof()
    for line in proof.of(subject, first=first):
        print_result(line)
    return EXIT_OK if proof.holds else EXIT_FAILED


def generate(words: Sequence[str]) -> int:
    """Write text."""
    from weft.commands.generate import generate as run  # nobody else pays for it

    return run(words)


def data_files(words: Sequence[str]) -> int:
    """Texts to token files."""
    from weft.commands.data import run  # nobody else pays for it

    return run(words)


def import_folder(words: Sequence[str]) -> int:
    """A Hugging Face folder to a run."""
    from weft.commands.import_ import import_folder as run  # nobody else pays for it

    return run(words)


def export(words: Sequence[str]) -> int:
    """A checkpoint to a Hugging Face folder."""
    from weft.commands.export import export as run  # nobody else pays for it

    return run(words)


@dataclass(frozen=True)
class Command:
    """One word after `weft`."""

    usage: str
    line: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    "train": Command(CONFIG_USAGE, "train a model; without words: a small LLaMA 3 on Python's own sources", train),
    "explain": Command(CONFIG_USAGE, "tell who does what in a run, and why, without starting it", explain),
    "simulate": Command(CONFIG_USAGE, "draw the pipeline of a run as simulated", simulate_run),
    "schedule": Command(commands_schedule.USAGE, commands_schedule.LINE, schedule),
    "prove": Command(
        "[RUN | CONFIG.toml] [--first 3]", "hold a run or a layout against one device, number by number", prove
    ),
    "generate": Command(
        "MODEL [--prompt TEXT ...]", "write text with a run, a checkpoint or a Hugging Face folder", generate
    ),
    "data": Command("prepare INPUT... | show FOLDER", "make token files of texts; see what is in them", data_files),
    "import": Command("HF-FOLDER --out RUN", "make a run of a Hugging Face folder", import_folder),
    "export": Command("RUN | CHECKPOINT HF-FOLDER", "make a Hugging Face folder of a checkpoint", export),
    "doctor": Command("", commands_doctor.LINE, commands_doctor.doctor),
}
COMMANDS_TO_COME = ("plan", "bench", "report", "launch", "chaos")


def _help_of_run(name: str, words: Sequence[str]) -> int:
    run = try_load([word for word in words if word not in HELP], FAMILIES).run
    return show_help(run, f"weft {name} {CONFIG_USAGE}", f"{COMMANDS[name].line}; here for the model {run.model.name}")
