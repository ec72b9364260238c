"""The program `weft`: commands, exit codes and error lines. All checks run before torch is imported."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft import __version__
from weft.checkpoint.disk import DISK_FULL_ERRNOS
from weft.checkpoint.remote_url import is_url, local_folder
from weft.code.trust import TRUST_FLAG, trusting_all
from weft.commands import compare as commands_compare
from weft.commands import complete as commands_complete
from weft.commands import dash as commands_dash
from weft.commands import doctor as commands_doctor
from weft.commands import explain as commands_explain
from weft.commands import init_file as commands_init
from weft.commands import launch as commands_launch
from weft.commands import prove as commands_prove
from weft.commands import replay as commands_replay
from weft.commands import report_page as commands_report
from weft.commands import runs as commands_runs
from weft.commands import status as commands_status
from weft.commands import sweep as commands_sweep
from weft.commands.command import Command, imported, installed_command, installed_commands
from weft.commands.console import HELP, help_of_run, prepare_streams, print_result, wants_help
from weft.config.command_options import take_options
from weft.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USER,
    Fault,
    RankError,
    UserError,
    WeftError,
    did_you_mean,
)
from weft.run.agent import end_with_agent
from weft.run.failure import describe_error
from weft.run.worker import OrderlyEnd, exit_code_of
from weft.start import environment, preflight
from weft.start.auto_mesh import choose_before_ranks
from weft.start.auto_recompute import choose_recompute_before_ranks
from weft.start.checked_run import load_checked_run
from weft.start.messages import print_error, print_messages
from weft.start.rules.start_checks import data_checks, environment_checks
from weft.start.train_checked import train_checked

CONFIG_USAGE = "[CONFIG.toml | MODEL.py] [--key value ...]"
VERSION = ("--version", "-v", "-V", "version")
MAX_FAULTS_SHOWN = 50
INPUT_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""Errors of the file system that a name or the rights of the input cause."""
LOCAL_COMMANDS = {
    "status": 1, "prove": 1, "replay": 1, "generate": 1, "chat": 1, "export": 2, "import": 1
}  # fmt: skip
"""Commands that read local folders, and how many of their first words may name one."""
PATIENCE_S = 1.0
"""Time that other ranks wait after a fault, so that torchrun does not end the first one before it
has printed the faults.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 ok, 1 failed, 2 invalid input, 75 stopped and saved, 130
    Ctrl-C.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    name, *words = given or ["--help"]
    prepare_streams()
    # models ask torch.cuda.is_available() as they are imported: by NVML, so that ranks can be forked
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice on configs is not of weft
    try:
        trusts, words = _take_switch(TRUST_FLAG, words)
        command = _command(name, words)
        with trusting_all() if trusts else contextlib.nullcontext():
            code = command.run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `weft train --help | head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except UserError as error:
        print_messages(_fault_lines(error.faults))
        if not environment.is_first(os.environ, environment.LOCAL_RANK_VARIABLES):
            time.sleep(PATIENCE_S)
        is_temporary = all(fault.is_temporary for fault in error.faults)
        return EXIT_PREEMPTED if is_temporary else EXIT_USER
    except RankError as error:
        # on every rank: the others do not have this error
        print_error(_rank_error_text(error))
        return EXIT_USER if error.kind == "user" else EXIT_FAILED
    except WeftError as error:
        print_messages([f"error: {error}"])
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        fault = Fault("torch", "is not installed", fix="pip install torch (see weft doctor)")
        print_messages([f"error: {fault}"])
        return EXIT_USER
    except OSError as error:
        if error.errno not in INPUT_ERRNOS and error.errno not in DISK_FULL_ERRNOS:
            raise
        fault = Fault(str(error.filename or "weft"), f"cannot be used: {error.strerror}")
        print_messages([f"error: {fault}"])
        return EXIT_USER if error.errno in INPUT_ERRNOS else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OrderlyEnd as end:
        return exit_code_of(end)
    except SystemExit as stop:  # of a user's model or optimizer: it has not finished anything
        failure = describe_error(stop, rank=0, at_s=time.monotonic())
        print_messages([f"error: the program was left by {failure.text}"])
        return EXIT_FAILED


def _take_switch(flag: str, words: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the words have a switch, with or without True after it, and all other words.

    Raises:
        UserError: it has another value than True or False.
    """
    others = [f"{flag}{word[len(flag) :]}" if _is(flag, word) else word for word in words]
    place = next((i for i, word in enumerate(others) if word.partition("=")[0] == flag), None)
    if place is None:
        return False, list(words)
    _, equals, value = others.pop(place).partition("=")
    if not equals and others[place : place + 1] in (["True"], ["False"]):
        value = others.pop(place)
    if value not in ("", "True", "False"):
        raise UserError(Fault(flag[2:], "wrong type", repr(value), "True or False", flag))
    return value != "False", others


def _is(flag: str, word: str) -> bool:
    return word.partition("=")[0].replace("-", "_") == flag.replace("-", "_")


def _fault_lines(faults: Sequence[Fault]) -> Iterator[str]:
    """A line for each fault, and the number of those that are too many to read."""
    for fault in faults[:MAX_FAULTS_SHOWN]:
        yield f"error: {fault}"
    num_hidden = len(faults) - MAX_FAULTS_SHOWN
    if num_hidden > 0:
        yield f"error: and {num_hidden} more faults"


def _rank_error_text(error: RankError) -> str:
    """The message of a failed rank; every fault of a user error gets a line of its own."""
    text = f"error: {error}"
    return text.replace("\n", "\nerror: ") if error.kind == "user" else text


def _command(name: str, words: Sequence[str]) -> Command:
    """The command of these words.

    Raises:
        UserError: there is none.
    """
    if name in VERSION:
        return Command("", "", lambda _words: print_result(f"weft {__version__}"))
    if name in (*HELP, "help"):
        named = _find(words[0], ()) if name == "help" and words else None
        if named is None:
            return Command("", "", lambda _words: print_result(overview()))
        return replace(named, run=lambda others: named.run([*others[1:], HELP[-1]]))
    command = _find(name, words)
    if command is not None:
        _reject_url(name, words)
        return command
    if name.startswith("-") or name.endswith(".toml"):
        fix = f"weft train {shlex.join([name, *words])}"
        raise UserError(Fault("weft", "no command is named", repr(name), "a command first", fix))
    names = all_commands()
    hint = did_you_mean(name, names)
    need = "" if hint.startswith("did") else f"one of {', '.join(names)}"
    fix = hint if hint.startswith("did") else "see weft --help"
    raise UserError(Fault("", f"unknown command {name!r}", need=need, fix=fix))


def _find(name: str, words: Sequence[str]) -> Command | None:
    """The command of this name, or the mode of it that the words have."""
    command = COMMANDS.get(name) or installed_command(name)
    for flag in command.modes if command is not None else ():
        if any(_is(flag, word) for word in words):
            mode = installed_command(f"{name} {flag}")
            if mode is None:
                what = "is a command of a package that is not installed"
                fix = "pip install weft-train, which has it"
                raise UserError(Fault(f"weft {name} {flag}", what, fix=fix))
            return mode
    return command


def all_commands() -> dict[str, Command]:
    """The commands of weft, then those of other installed packages."""
    return COMMANDS | installed_commands()


def _reject_url(name: str, words: Sequence[str]) -> None:
    """Reject a URL as the run of a command that reads local folders.

    Raises:
        UserError: it is one.
    """
    if name not in LOCAL_COMMANDS:
        return
    for word in words[: LOCAL_COMMANDS[name]]:
        if is_url(word) and not word.startswith("-"):
            what = "reads local folders, and this is a URL"
            fix = f"copy it here, or on the machine of the run name {local_folder(word)}"
            raise UserError(Fault(f"weft {name}", what, repr(word), "a folder", fix))


def overview() -> str:
    """All commands by purpose, one line each, and two to begin with."""
    by_purpose: dict[str, list[str]] = {purpose: [] for purpose in PURPOSES}
    for name, command in all_commands().items():
        by_purpose.setdefault(command.purpose, []).append(f"  weft {name:<9} {command.line}")
    lines = [line for purpose in by_purpose for line in ("", f"{purpose}:", *by_purpose[purpose])]
    return "\n".join(
        (
            "weft trains one model on many devices. To begin with:",
            "",
            '  weft explain --mesh "dp2 tp2"             who computes, holds and sends what',
            '  weft train --mesh "dp2 tp2" --steps 20    four ranks on this machine',
            *lines,
            "",
            "weft NAME --help shows usage and keys of a command.",
            f"{TRUST_FLAG}: with any command, run the code that a stored file names.",
            "Exit codes: 0 ok, 1 failed, 2 invalid input, 75 stopped and saved, 130 Ctrl-C.",
        )
    )


def train(words: Sequence[str]) -> int:
    """Check the config and its environment, then train."""
    if wants_help(words):
        return help_of_run("train", COMMANDS["train"], words)
    end_with_agent(os.environ)
    run = load_checked_run(
        words,
        data_checks,
        environment_checks,
        adapt=preflight.after_restart,
        choose_mesh=choose_before_ranks,
        choose_recompute=choose_recompute_before_ranks,
    )
    return train_checked(run).code


def explain(words: Sequence[str]) -> int:
    """Print the layout of a config, the reasons for it, and what it costs."""
    if wants_help(words):
        return help_of_run(
            "explain", COMMANDS["explain"], take_options(words, commands_explain.ExplainOptions)[1]
        )
    return commands_explain.explain(words)


def complete(words: Sequence[str]) -> int:
    """Print a script by which a shell completes the commands."""
    return commands_complete.complete(words, all_commands())


PURPOSES = ("before a run", "train", "be sure of the numbers", "use a model")
"""Headings of `weft --help`: what a reader wants."""
BEFORE, TRAIN, NUMBERS, USE = PURPOSES
COMMANDS = {
    "init": Command(commands_init.USAGE, commands_init.LINE, commands_init.init, purpose=BEFORE),
    "explain": Command(
        f"{CONFIG_USAGE} {commands_explain.USAGE}",
        "print the layout of a run, its memory and its traffic",
        explain,
        purpose=BEFORE,
    ),
    "complete": Command(commands_complete.USAGE, commands_complete.LINE, complete, purpose=BEFORE),
    "doctor": Command("", commands_doctor.LINE, commands_doctor.doctor, purpose=BEFORE),
    "train": Command(
        CONFIG_USAGE,
        "train a model (default: a small LLaMA 3 on Python's sources)",
        train,
        purpose=TRAIN,
    ),
    "data": Command(
        "prepare INPUT... | show FOLDER | show RECORDS",
        "prepare token files from texts and records; show their contents",
        imported("weft.commands.data:run"),
        purpose=TRAIN,
    ),
    "sweep": Command(
        commands_sweep.USAGE, commands_sweep.LINE, commands_sweep.sweep, purpose=TRAIN
    ),
    "launch": Command(
        "ENGINE [CONFIG.toml] [--nodes N ...]",
        commands_launch.LINE,
        commands_launch.launch,
        purpose=TRAIN,
    ),
    "status": Command(
        commands_status.USAGE, commands_status.LINE, commands_status.status, purpose=TRAIN
    ),
    "runs": Command(commands_runs.USAGE, commands_runs.LINE, commands_runs.runs, purpose=TRAIN),
    "compare": Command(
        commands_compare.USAGE, commands_compare.LINE, commands_compare.compare, purpose=TRAIN
    ),
    "report": Command(
        commands_report.USAGE, commands_report.LINE, commands_report.report, purpose=TRAIN
    ),
    "dash": Command(commands_dash.USAGE, commands_dash.LINE, commands_dash.dash, purpose=TRAIN),
    "axes": Command(
        "MODEL.py [--check False] [--key value ...]",
        "propose the AXES of a model file by tracing it, and prove them",
        imported("weft.commands.axes:axes"),
        purpose=TRAIN,
    ),
    "prove": Command(
        commands_prove.USAGE,
        commands_prove.LINE,
        commands_prove.prove,
        purpose=NUMBERS,
        modes=commands_prove.MODES,
    ),
    "replay": Command(
        commands_replay.USAGE, commands_replay.LINE, commands_replay.replay, purpose=NUMBERS
    ),
    "generate": Command(
        "MODEL [--prompt TEXT ...]",
        "generate text with a run, checkpoint or Hugging Face folder",
        imported("weft.commands.generate:generate"),
        purpose=USE,
    ),
    "chat": Command(
        "MODEL [--system TEXT ...]",
        "a conversation with a run, checkpoint or Hugging Face folder",
        imported("weft.commands.chat:chat"),
        purpose=USE,
    ),
    "eval": Command(
        "MODEL [--data SOURCE ...]",
        "loss and bits per byte of a stored model on any data and layout",
        imported("weft.commands.eval:evaluate"),
        purpose=USE,
    ),
    "import": Command(
        "HF-FOLDER --out RUN",
        "import a Hugging Face folder as a run",
        imported("weft.commands.import_:import_folder"),
        purpose=USE,
    ),
    "export": Command(
        "RUN | CHECKPOINT HF-FOLDER",
        "export a checkpoint as a Hugging Face folder",
        imported("weft.commands.export:export"),
        purpose=USE,
    ),
}
"""The commands of this package; other packages add theirs by entry points."""
