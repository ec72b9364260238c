"""The small files of a Hugging Face folder: config.json, tokenizer, defaults of generation; and `refuse_existing`. No torch.

A run keeps them in RUN/hf/; an export writes them into the new folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.errors import CheckpointError, Fault

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
MAX_SIDECAR_BYTES = 2**28


def read_sidecars(folders: Iterable[Path]) -> dict[str, str]:
    """Content of the small files of these folders by name; the first folder that has one counts."""
    found: dict[str, str] = {}
    for folder in folders:
        for name in SIDECAR_NAMES:
            path = folder / name
            if name not in found and path.is_file() and path.stat().st_size <= MAX_SIDECAR_BYTES:
                found[name] = path.read_text(encoding="utf-8")
    return found


def write_sidecars(run_folder: Path, texts: Mapping[str, str]) -> None:
    """Write them into the run folder."""
    folder = run_folder / SIDECAR_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def refuse_existing(folder: Path) -> None:
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
