"""`weft init`: asks what a run is to train, on what and how long, and writes a commented config file. Imports no torch."""

from __future__ import annotations

import glob
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.config import flags
from weft.config.command_options import take_options
from weft.config.families import DEFAULT_PRESET
from weft.config.keys import flatten
from weft.config.load import AUTO_MESH, DEFAULT_SOURCE, try_load
from weft.config.new_file import new_file_text
from weft.config.run import Run
from weft.config.schema import ConfigSection
from weft.config.user_code import is_file_reference
from weft.errors import Fault, UserError
from weft.models import FAMILIES
from weft.start.auto_mesh import ChosenMesh
from weft.start.checked_run import load_checked_run
from weft.start.environment import GPU_FILES
from weft.start.messages import print_error
from weft.start.rules.start_checks import data_checks

NAME = "weft init"
USAGE = "[FILE.toml] [--key value ...] [--devices N]"
LINE = "ask a few questions and write a commented config file"
DEFAULT_FILE = "run.toml"
MODEL_KEYS = ("model.preset", "model.name", "model.from_hf")
TINY = "-tiny"
LARGER_MODEL = {"optim.lr": "3e-4", "data.seq_len": "1024"}
"""Defaults of weft are for its tiny models; these are for models of a hundred million parameters and
more.
"""
SETTINGS = (
    *("steps", "mesh", *MODEL_KEYS, "data.source", "data.seq_len"),
    *("batch.global_size", "batch.micro_size", "optim.lr"),
)
"""Keys that a file sets in any case, if they have a value."""
SUGGESTIONS = {
    "mesh": "dp2",
    "sample": 40,
    "track": ["tensorboard"],
    "optim.warmup": 20,
    "eval.every": 100,
    "eval.source": "valid.txt",
    "save.every": 100,
}
"""Keys that are shown as comments, with an example of a value."""


class NewFileOptions(ConfigSection):
    """What is asked beside keys of a run."""

    devices: int | None = Field(
        None, ge=1, le=2**20, description="ranks, one for each device; None: one for each GPU here"
    )


@dataclass(frozen=True)
class InitQuestion:
    """One question that `weft init` asks.

    Attributes:
        text: what is asked.
        keys: it is not asked where a flag sets one of them.
        default: the answer where there is none, from the words so far.
        flags_of: the flags that an answer means, from it and the words so far.
    """

    text: str
    keys: tuple[str, ...]
    default: Callable[[Sequence[str]], str]
    flags_of: Callable[[str, Sequence[str]], list[str]]


def init(words: Sequence[str]) -> int:
    """Write a config file from answers, flags and defaults.

    Raises:
        UserError: the file exists, or the run of the flags is not valid; nothing is written.
    """
    if wants_help(words):
        usage = f"{NAME} {USAGE}"
        return show_help(NewFileOptions(), usage, f"{LINE}. All keys of `weft train` as well")
    options, run_words = take_options(words, NewFileOptions)
    path, run_words = _file_of(run_words)
    _check_new(path)
    if options.devices is not None:
        run_words = [*run_words, *_mesh(str(options.devices), run_words)]
    _checked(run_words)  # a wrong flag would make every answer wrong
    answered = _for_size(_with_answers(run_words))
    run = _checked(answered)
    file = shlex.quote(str(path))
    _write_new(path, new_file_text(file, run, _keys_of_file(run, answered), SUGGESTIONS))
    print_result(f"{path} is written. Who computes, holds and sends what, then the run itself:")
    print_result(f"  weft explain {file}")
    return print_result(f"  weft train {file}")


def _file_of(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The file that is to be written, and all other words.

    Raises:
        UserError: the words name several files, or one that is no TOML file.
    """
    loose = list(flags.split(words).loose)
    files = [word for word in loose if not is_file_reference(word)]
    if len(files) > 1:
        got = " ".join(files)
        raise UserError(Fault(NAME, "writes one file", got=got, fix=f"{NAME} {DEFAULT_FILE}"))
    if files and not files[0].endswith(".toml"):
        need, fix = "a name that ends in .toml", f"{NAME} {DEFAULT_FILE}"
        raise UserError(Fault(NAME, "writes a TOML file", got=repr(files[0]), need=need, fix=fix))
    others = list(words)
    for file in files:
        others.remove(file)
    return Path(files[0] if files else DEFAULT_FILE), others


def _check_new(path: Path) -> None:
    """Check that no file would be overwritten.

    Raises:
        UserError: there is such a file, or no folder for it.
    """
    if os.path.lexists(path):
        fix = f"{NAME} with another name, or remove the file"
        raise UserError(Fault(NAME, "overwrites no file", got=repr(str(path)), fix=fix))
    if not path.parent.is_dir():
        what, got = "the folder of the file does not exist", repr(str(path.parent))
        raise UserError(Fault(NAME, what, got=got, fix=f"mkdir -p {path.parent}"))


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror}"
        fix = f"{NAME} with a file in another folder"
        raise UserError(Fault(NAME, "cannot write the file", got=got, fix=fix)) from None


# -- questions --------------------------------------------------------------------------------


def _with_answers(words: Sequence[str]) -> list[str]:
    """The words with the flags of all answers; without a terminal these are the defaults."""
    asks = sys.stdin is not None and sys.stdin.isatty()
    found = list(words)
    for question in QUESTIONS:
        given = {key for key, _ in flags.split(found).flags}
        if given.isdisjoint(question.keys) and not _names_model(question, found):
            found = _answered(question, found) if asks else _with_default(question, found)
    return found


def _names_model(question: InitQuestion, words: Sequence[str]) -> bool:
    """Whether a model file among the words is the answer."""
    return question.keys == MODEL_KEYS and any(map(is_file_reference, flags.split(words).loose))


def _with_default(question: InitQuestion, words: Sequence[str]) -> list[str]:
    return [*words, *question.flags_of(question.default(words), words)]


def _answered(question: InitQuestion, words: Sequence[str]) -> list[str]:
    """The words with an answer that is valid; one that is not is reported, and asked for again."""
    default = question.default(words)
    while True:
        answer = _read(f"{question.text} [{default}]: ").strip() or default
        found = [*words, *question.flags_of(answer, words)]
        try:
            _checked(found)
        except UserError as error:
            for fault in error.faults:
                print_error(f"error: {fault}")
        else:
            return found


def _read(prompt: str) -> str:
    """A line from the terminal.

    Raises:
        KeyboardInterrupt: the input has ended (Ctrl-D): nothing is written.
    """
    try:
        return input(prompt)
    except EOFError:
        raise KeyboardInterrupt from None


def _checked(words: Sequence[str]) -> Run:
    """The run of these words, with the checks of its config and its data; `mesh = "auto"` is left to
    the commands that take it.

    Raises:
        UserError: with every fault.
    """
    loaded = try_load(words, FAMILIES)
    run = load_checked_run(words, data_checks, choose_mesh=lambda run, is_flag: ChosenMesh("", ""))
    return run if loaded.auto_mesh is None else run.with_values({"mesh": AUTO_MESH})


def _model(answer: str, words: Sequence[str]) -> list[str]:
    """A preset, a family or model file, or a folder of Hugging Face."""
    if is_file_reference(answer) or answer in FAMILIES:
        return ["--model.name", answer]
    if os.path.isdir(answer):
        return ["--model.from_hf", answer]
    return ["--model.preset", answer]


def _for_size(words: Sequence[str]) -> list[str]:
    """The words with learning rate and length of a preset that is not tiny, unless flags set them."""
    model = try_load(words, FAMILIES).run.model
    is_larger = model.kind == "tokens" and not (model.preset or TINY).endswith(TINY)
    given = {key for key, _ in flags.split(words).flags}
    found = list(words)
    for key, value in LARGER_MODEL.items():
        if is_larger and key not in given:
            found += [f"--{key}", value]
    return found


def _mesh(answer: str, words: Sequence[str]) -> list[str]:
    """Data ranks on all devices, and a batch that they divide."""
    if not answer.isdecimal() or int(answer) < 2:
        return ["--mesh", ""] if answer == "1" else ["--nproc", answer]
    num_ranks = int(answer)
    run = try_load(words, FAMILIES).run
    unit = num_ranks * run.batch.micro_size
    found = ["--mesh", f"dp{num_ranks}"]
    if run.batch.global_size % unit:
        found += ["--batch.global_size", str(-(-run.batch.global_size // unit) * unit)]
    return found


def _default_source(words: Sequence[str]) -> str:
    return DEFAULT_SOURCE[try_load(words, FAMILIES).run.model.kind]


def _num_gpus(_words: Sequence[str]) -> str:
    """GPUs that this machine has and the environment shows; 1 without any."""
    num_gpus = len(glob.glob(GPU_FILES[0]))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = min(num_gpus, len([word for word in visible.split(",") if word.strip()]))
    return str(max(num_gpus, 1))


QUESTIONS = (
    InitQuestion(
        "model: a preset (gpt2-124m, llama3-1b, ...), a model file, a Hugging Face folder",
        MODEL_KEYS,
        lambda words: DEFAULT_PRESET,
        _model,
    ),
    InitQuestion(
        "data: stdlib (Python's sources), a file, a folder, a pattern",
        ("data.source", "data.mix"),
        _default_source,
        lambda answer, words: ["--data.source", answer],
    ),
    InitQuestion("devices: one rank on each", ("mesh", "nproc"), _num_gpus, _mesh),
    InitQuestion(
        "steps",
        ("steps",),
        lambda words: str(Run.model_fields["steps"].default),
        lambda answer, words: ["--steps", answer],
    ),
)


def _keys_of_file(run: Run, words: Sequence[str]) -> list[str]:
    """The keys that the file sets: those of the answers, of flags, and the usual ones."""
    values = flatten(run.model_dump(mode="json", exclude_none=True))
    given = [key for key, _ in flags.split(words).flags]
    follows = set(MODEL_KEYS[1:]) if run.model.preset else set()
    if run.model.from_hf:
        follows = {"model.preset", "model.name"}
    found = [key for key in SETTINGS if key not in follows or key in given]
    return [key for key in dict.fromkeys((*found, *given)) if values.get(key) not in (None, "")]
