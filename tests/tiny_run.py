"""Flags of a training run that takes under a second: two layers of width 16 on short sequences."""

from __future__ import annotations

from pathlib import Path

MODEL = (
    *("--model.layers", "2", "--model.dim", "16", "--model.heads", "2"),
    *("--model.kv_heads", "2", "--model.ffn", "32"),
)
SEQUENCES = ("--data.seq_len", "8", "--batch.micro_size", "1")
TINY = (*MODEL, *SEQUENCES, "--batch.global_size", "4", "--transport", "threads")
"""With ranks in threads."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 400


def write_text(folder: Path) -> Path:
    """A text to train on."""
    path = folder / "text.txt"
    path.write_text(TEXT)
    return path
