"""Owns `weft import`: a Hugging Face folder becomes a run that can be trained on, generated from and exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from weft.checkpoint.folder import FOLDER
from weft.commands.console import print_result, set_openmp_policy, show_help, wants_help
from weft.config import flags
from weft.config.hf.describe import CONFIG
from weft.config.load import try_load
from weft.config.run import Run
from weft.config.schema import ConfigSection
from weft.errors import EXIT_FAILED, EXIT_OK, ConfigError, Fault, UserError
from weft.hf.kept import KEPT
from weft.models import FAMILIES
from weft.train import preflight

USAGE = "DIR --out RUN [--model.key value ...]"
LINE = "make a run of a Hugging Face folder: config.json and safetensors"


class Importing(ConfigSection):
    """What `weft import` is asked for, besides the folder and keys of the model that it leaves open."""

    out: str = Field("", description="run folder to make")
    compare: bool = Field(True, description="end with a comparison with transformers, where it is installed")


def import_folder(words: Sequence[str]) -> int:
    """Check the folder, write the run, compare."""
    if wants_help(words):
        return show_help(Importing(), f"weft import {USAGE}", LINE)
    if not words or words[0].startswith("--"):
        fix = "for example weft import Qwen3-0.6B --out runs/qwen"
        raise UserError(Fault("weft import", "no folder is named", need=f"a folder with {CONFIG} first", fix=fix))
    given = flags.split(words[1:])
    of_model = [(name, value) for name, value in given.flags if name.startswith("model.")]
    own = [word for name, value in given.flags if not name.startswith("model.") for word in (f"--{name}", *value)]
    asked = flags.read_config([*given.loose, *own], Importing)
    run = described_run(words[0], [word for name, value in of_model for word in (f"--{name}", *value)])
    check_out(asked.out)
    set_openmp_policy()
    from weft.train.exchange import bring  # imports torch, and so comes after all checks

    done = bring(Path(words[0]), Path(asked.out), run, compares=asked.compare)
    print_result("\n".join(done.lines))
    return EXIT_OK if done.holds else EXIT_FAILED


def described_run(folder: str, of_model: Sequence[str]) -> Run:
    """A run of the folder's model; all else stands at its default.

    Raises:
        UserError: the folder has no model of weft's, or not all of its tensors; nothing of them has been read.
    """
    loaded = try_load(["--model.from_hf", folder, *of_model], FAMILIES)
    if faults := (*loaded.faults, *(() if loaded.faults else preflight.start_faults(loaded.run))):
        raise ConfigError(*faults)
    return loaded.run


def check_out(out: str) -> None:
    """Refuse a run folder that holds something already.

    Raises:
        ConfigError: nothing is named, or it is no fresh folder.
    """
    if not out:
        raise ConfigError(Fault("out", "no run folder is named", need="a folder to make", fix="--out runs/first"))
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ConfigError(Fault("out", "is no folder", repr(out), fix="choose another --out"))
    if held := [name for name in ("run.toml", preflight.EVENTS, FOLDER, KEPT) if (path / name).exists()]:
        raise ConfigError(
            Fault("out", "holds a run already", f"{out!r} with {', '.join(held)}", fix="choose another --out")
        )
