"""Owns a checkpoint of stored parameters alone: what `weft import` makes of a folder, a gigabyte at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.checkpoint.folder import checkpoint_path, temporary_path
from weft.checkpoint.format import Facts, Manifest
from weft.checkpoint.held import Held
from weft.checkpoint.source import Source
from weft.checkpoint.write import commit, discard, start_write
from weft.hf.folder import slabs

CHUNK_BYTES = 2**30
"""What is in memory at a time, and the size of one file."""


def write_parameters(run_folder: Path, source: Source, facts: Facts, *, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    """Write the checkpoint of step `facts.step`, with the section `model` and no other.

    Raises:
        CheckpointError: it is there already, or the disk refuses; what was written is gone then.
    """
    final = checkpoint_path(run_folder, facts.step)
    tmp = temporary_path(final)
    discard(tmp)
    ranks = 0
    try:
        for ranks, chunk in enumerate(_chunks(source, chunk_bytes), start=1):
            start_write(tmp, ranks - 1, chunk).wait()
            chunk.clear()
    except BaseException:
        discard(tmp)
        raise
    return commit(tmp, final, facts, ranks=ranks)


def _chunks(source: Source, chunk_bytes: int) -> Iterator[list[Held]]:
    chunk: list[Held] = []
    filled = 0
    for name, shape in source.shapes.items():
        for box in slabs(shape):
            piece = Held(f"model/{name}", shape, box, source.read(name, box))
            if chunk and filled + piece.num_bytes > chunk_bytes:
                yield chunk
                chunk, filled = [], 0
            chunk.append(piece)
            filled += piece.num_bytes
    yield chunk
