"""Owns `weft export`: a checkpoint becomes a Hugging Face folder that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from weft.checkpoint.folder import FOLDER
from weft.commands.console import print_messages, print_result, set_openmp_policy, show_help, wants_help
from weft.config import flags
from weft.config.hf.compose import unwritable
from weft.config.schema import ConfigSection
from weft.data.tokenizer import BYTES
from weft.errors import EXIT_FAILED, EXIT_OK, CheckpointError, Fault, UserError
from weft.generate.subject import Subject, find_subject
from weft.hf.kept import KEPT
from weft.hf.written import refuse_filled

USAGE = "RUN | CHECKPOINT DIR [--dtype bfloat16] [--key value ...]"
LINE = "make a Hugging Face folder of a checkpoint: config.json and safetensors"


class Exporting(ConfigSection):
    """What `weft export` is asked for, besides what to export and where to."""

    dtype: Literal["stored", "float64", "float32", "bfloat16", "float16"] = Field(
        "stored", description="type of the tensors; stored: as the checkpoint has them"
    )
    max_shard_bytes: int = Field(5 * 10**9, ge=1, description="largest file of tensors, bytes")
    adapters: bool = Field(False, description="adapters alone, in PEFT's layout; else they are merged into the model")
    compare: bool = Field(True, description="end with a comparison with transformers, where it is installed")


def export(words: Sequence[str]) -> int:
    """Check what is asked, write the folder, compare."""
    if wants_help(words):
        return show_help(Exporting(), f"weft export {USAGE}", LINE)
    places, rest = _places(words)
    asked = flags.read_config(rest, Exporting)
    subject = stored_model(places[0])
    refuse_filled(Path(places[1]))
    print_messages(f"note: {note}" for note in subject.notes)
    set_openmp_policy()
    from weft.train.exchange import send, send_adapters  # imports torch, and so comes after all checks

    if asked.adapters:
        return print_result(send_adapters(subject.path, Path(places[1]), base=subject.run.model.from_hf))
    done = send(
        subject.path,
        Path(places[1]),
        dtype=None if asked.dtype == "stored" else asked.dtype,
        max_shard_bytes=asked.max_shard_bytes,
        kept=tuple(came_with(subject)),
        compares=asked.compare,
    )
    print_result("\n".join(done.lines))
    return EXIT_OK if done.holds else EXIT_FAILED


def _places(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The two folders, and the flags."""
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if first != 2:
        got = " ".join(words[:first]) or "nothing"
        need = "a run or checkpoint, then the folder to make"
        fix = "for example weft export runs/first exported/first"
        raise UserError(Fault("weft export", f"{'no' if first < 2 else 'too many'} folders are named", got, need, fix))
    return words[:2], words[2:]


def stored_model(word: str) -> Subject:
    """The checkpoint that is meant, of a model that transformers has.

    Raises:
        CheckpointError: there is none, or its model has no counterpart in transformers.
    """
    subject = find_subject(word)
    if subject.kind == "hf":
        raise CheckpointError(Fault(word, "is a Hugging Face folder already", need="a run or one of its checkpoints"))
    if faults := tuple(unwritable(subject.run.model.name, subject.run.model)):
        raise CheckpointError(*faults)
    return subject


def came_with(subject: Subject) -> Iterator[Path]:
    """Folders that may have the small files of the model: the run's own, the one it started from, its tokenizer's."""
    if subject.path.parent.name == FOLDER:
        yield subject.path.parent.parent / KEPT
    if subject.run.model.from_hf:
        yield Path(subject.run.model.from_hf)
    if (name := subject.run.data.tokenizer) != BYTES:
        path = Path(name)
        yield path if path.is_dir() else path.parent
