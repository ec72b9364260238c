"""Owns in what order all bytes of a checkpoint are verified, and how ranks share the work. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.checkpoint.format import Manifest, Piece, Stored


@dataclass(frozen=True)
class Unit:
    """The least that is verified at once: one block of one piece."""

    name: str
    stored: Stored
    piece: Piece
    block: int


def units(manifest: Manifest) -> Sequence[Unit]:
    """All blocks of all pieces in the order of files and places."""
    every = (
        Unit(name, stored, piece, block)
        for name, stored in manifest.tensors.items()
        for piece in stored.pieces
        for block in range(len(piece.crc32))
    )
    return sorted(every, key=lambda unit: (unit.piece.file, unit.piece.at, unit.block))


def share(every: Sequence[Unit], index: int, count: int) -> Iterator[Unit]:
    """Share `index` of `count`: neighbours, about as many bytes in each share."""
    sizes = [unit.stored.num_bytes(unit.piece) // len(unit.piece.crc32) for unit in every]
    total, before = sum(sizes), 0
    for unit, size in zip(every, sizes, strict=True):
        if before * count // max(1, total) == index:
            yield unit
        before += size
