"""`weft import`: a Hugging Face folder becomes a run that can be trained, generated from and exported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from weft.checkpoint.folder import FOLDER, resume_command
from weft.commands.console import print_result, show_help, wants_help
from weft.config import flags
from weft.config.hf.from_hf import TOKENIZER
from weft.config.hf.read_config import CONFIG
from weft.config.load import try_load
from weft.config.run import Run
from weft.config.schema import ConfigSection
from weft.config.toml import dump
from weft.data.tokenizer import BYTES
from weft.errors import EXIT_FAILED, EXIT_OK, ConfigError, Fault, UserError
from weft.hf.folder_checks import import_faults
from weft.hf.sidecar import SIDECAR_FOLDER, read_sidecars
from weft.models import FAMILIES
from weft.start.checked_run import set_openmp_policy
from weft.start.rules.run_folders import from_hf_faults, write_problem
from weft.train.event_log import EVENTS

if TYPE_CHECKING:
    from weft.hf.import_hf import TransferResult

USAGE = "DIR --out RUN [--model.key value ...]"
LINE = "import a Hugging Face folder (config.json and safetensors) as a run"
CHUNK_BYTES = 2**30
"""Bytes in memory at a time, and the size of one file of the checkpoint."""


class ImportOptions(ConfigSection):
    """Flags of `weft import`, besides keys of the model that the folder leaves open."""

    out: str = Field("", description="run folder to write")
    compare: bool = Field(
        True, description="end with a comparison with transformers, where it is installed"
    )


def import_folder(words: Sequence[str]) -> int:
    """Check the folder, write the run, compare."""
    if wants_help(words):
        return show_help(ImportOptions(), f"weft import {USAGE}", LINE)
    if not words or words[0].startswith("--"):
        fix = "for example weft import Qwen3-0.6B --out runs/qwen"
        raise UserError(
            Fault(
                "weft import", "no folder is named", need=f"a folder with {CONFIG} first", fix=fix
            )
        )
    folder = words[0]
    model_words, other_words = _split_flags(words[1:])
    options = flags.read_config(other_words, ImportOptions)
    set_openmp_policy()
    result = import_run(
        Path(folder),
        Path(options.out) if options.out else None,
        model_words,
        compares=options.compare,
    )
    print_result("\n".join(result.lines))
    return EXIT_OK if result.is_equal else EXIT_FAILED


def import_run(
    folder: Path,
    out: Path | None,
    model_words: Sequence[str] = (),
    *,
    compares: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> TransferResult:
    """Make the run folder `out` of a Hugging Face folder.

    Args:
        model_words: keys of the model that the folder leaves open: `--model.key value`.
        compares: whether to end with a comparison with transformers.

    Raises:
        UserError: the folder has no model that weft supports, or `out` cannot be made.
        CheckpointError: a tensor has another shape than config.json makes of it, or a disk
            error occurs.
    """
    run = described_run(str(folder), model_words)
    run_folder = new_folder(out)
    from weft.hf.import_hf import (
        import_facts,
        import_hf,
    )  # imports torch, and so comes after all checks
    from weft.train.build import check_initial_parameters

    check_initial_parameters(run.model)
    has_tokenizer = TOKENIZER in read_sidecars([folder])
    if has_tokenizer:
        tokenizer = str((run_folder / SIDECAR_FOLDER / TOKENIZER).absolute())
    else:
        tokenizer = run.data.tokenizer
    imported = run.with_values(
        {
            "model.from_hf": None,  # the run reads nothing from the Hugging Face folder
            "data.tokenizer": tokenizer,
            "out": str(run_folder),
        }
    )
    facts = import_facts(imported.model, seed=imported.seed, tokenizer=imported.data.tokenizer)
    return import_hf(
        folder,
        run_folder,
        run.model,
        facts=facts,
        run_toml=dump(imported),
        compares=compares,
        advice=_advice(imported, has_tokenizer=has_tokenizer),
        chunk_bytes=chunk_bytes,
    )


def _advice(run: Run, *, has_tokenizer: bool) -> str:
    """How an imported run is trained: a folder without a tokenizer cannot say what its tokens are."""
    command = resume_command(Path(str(run.out)))
    if has_tokenizer or run.data.tokenizer != BYTES:
        return f"train it: {command}"
    return (
        f"the folder has no {TOKENIZER}: name the one of the model, with your data: "
        f"{command} --data.tokenizer FILE --data.source TEXTS"
    )


def _split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of model keys, and all other words."""
    given = flags.split(words)
    model_words: list[str] = []
    other_words = list(given.loose)
    for name, values in given.flags:
        is_of_model = name.startswith("model.")
        target = model_words if is_of_model else other_words
        target.append(f"--{name}")
        target.extend(values)
    return model_words, other_words


def described_run(folder: str, model_words: Sequence[str]) -> Run:
    """A run of the folder's model; all other keys have their defaults.

    Raises:
        UserError: the folder has no model that weft supports, or not all of its tensors; none of
            them has been read.
    """
    loaded = try_load(["--model.from_hf", folder, *model_words], FAMILIES)
    faults = (
        loaded.faults
        or tuple(from_hf_faults(loaded.run.model))
        or tuple(import_faults(Path(folder), loaded.run.model))
    )
    if faults:
        raise ConfigError(*faults)
    return loaded.run


def new_folder(path: Path | None) -> Path:
    """The run folder to make, which does not exist yet or holds no run.

    Raises:
        ConfigError: none is named, or the named one holds a run or cannot be written.
    """
    if path is None:
        raise ConfigError(
            Fault("out", "no run folder is named", need="a folder to make", fix="--out runs/first")
        )
    out = str(path)
    if os.path.exists(path) and not path.is_dir():
        raise ConfigError(Fault("out", "is no folder", got=repr(out), fix="choose another --out"))
    names = ("run.toml", EVENTS, FOLDER, SIDECAR_FOLDER)
    existing = [name for name in names if os.path.lexists(path / name)]
    if existing:
        got = f"{out!r} with {', '.join(existing)}"
        raise ConfigError(Fault("out", "holds a run already", got=got, fix="choose another --out"))
    problem = write_problem(path)
    if problem is not None:
        got = f"{out!r}: {problem}"
        raise ConfigError(Fault("out", "cannot be written", got=got, fix="choose another --out"))
    return path
