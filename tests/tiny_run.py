"""Flags of a training run that takes under a second: two layers of width 16, ranks in threads."""

from __future__ import annotations

TINY = (
    *[
        "--model.layers",
        "2",
        "--model.dim",
        "16",
        "--model.heads",
        "2",
        "--model.kv_heads",
        "2",
        "--model.ffn",
        "32",
    ],
    *[
        "--data.seq_len",
        "8",
        "--batch.global_size",
        "4",
        "--batch.micro_size",
        "1",
        "--transport",
        "threads",
    ],
)
