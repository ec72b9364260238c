"""The small files of a Hugging Face folder: config.json, tokenizer, defaults of generation; and `reject_existing`. No torch.

A run keeps them in RUN/hf/; an export writes them into the new folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.errors import CheckpointError, Fault
from weft.small_files import MIB, UnreadableFile, read_text

SIDECAR_FOLDER = "hf"
SIDECAR_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
MAX_SIDECAR_BYTES = 128 * MIB


def read_sidecars(folders: Iterable[Path]) -> dict[str, str]:
    """Content of the small files of these folders by name; the first folder that has one counts.

    Raises:
        CheckpointError: with each that is no UTF-8 text of `MAX_SIDECAR_BYTES`, no regular file, or
            a link that leads out of its folder.
    """
    found: dict[str, str] = {}
    faults: list[Fault] = []
    for folder in folders:
        for name in SIDECAR_NAMES:
            if name in found:
                continue
            try:
                found[name] = read_text(folder / name, max_bytes=MAX_SIDECAR_BYTES, within=folder)
            except UnreadableFile as error:
                if not error.is_missing:
                    faults.append(error.fault(fix="remove it, or replace it by a copy"))
    if faults:
        raise CheckpointError(*faults)
    return found


def write_sidecars(run_folder: Path, texts: Mapping[str, str]) -> None:
    """Write them into the run folder."""
    folder = run_folder / SIDECAR_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        file = folder / name
        file.write_text(text, encoding="utf-8")


def reject_existing(folder: Path) -> None:
    """Check that `folder` does not exist, or is empty.

    Raises:
        CheckpointError: it would be overwritten.
    """
    if not folder.exists():
        return
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if not is_empty:
        fix = "choose another folder, or move it away"
        raise CheckpointError(
            Fault(str(folder), "exists already", need="an empty folder, or none", fix=fix)
        )
