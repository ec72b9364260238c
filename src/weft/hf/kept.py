"""Owns the small files that a model comes with: config.json, tokenizer, defaults of generation. A run keeps them. Pure.

They stand in RUN/hf/ and go back into the folder that is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

KEPT = "hf"
NAMES = (
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
MOST_BYTES = 2**28


def find_texts(folders: Iterable[Path]) -> dict[str, str]:
    """The small files of these folders by name; the first folder that has one counts."""
    found: dict[str, str] = {}
    for folder in folders:
        for name in NAMES:
            path = folder / name
            if name not in found and path.is_file() and path.stat().st_size <= MOST_BYTES:
                found[name] = path.read_text(encoding="utf-8")
    return found


def keep_texts(run_folder: Path, texts: Mapping[str, str]) -> None:
    """Put them into the run folder."""
    (run_folder / KEPT).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (run_folder / KEPT / name).write_text(text, encoding="utf-8")
