"""Checks of a prepared folder's contents at the start of a run: all bytes of a small file, samples of a large one. No torch.

    size up to 32 MiB   the SHA-256 of meta.json
    larger              CRC-32 of 512 blocks of 64 KiB, evenly spread, the first and the last among them

A folder that an older weft prepared has no checksums of blocks: then the first and last tokens are
checked against the vocabulary, and all sizes. `weft data show --verify True` reads everything.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.document_bounds import BOUND
from weft.data.files import KEY
from weft.data.prepared import PREPARE_AGAIN, Prepared, Split, hash_file
from weft.data.tokens import SCANNED_TOKENS, VERIFIED_BYTES, verified_part
from weft.errors import DataError, Fault
from weft.small_files import UnreadableFile, open_regular

MAX_BLOCKS = 512
BLOCK_BYTES = VERIFIED_BYTES // MAX_BLOCKS
BOUNDS_AT_ONCE = 2**20


def block_offsets(size: int) -> list[int]:
    """Where the sampled blocks of a file begin: all of a small file, else evenly spread."""
    if size <= VERIFIED_BYTES:
        return list(range(0, size, BLOCK_BYTES))
    last_offset = size - BLOCK_BYTES
    last_index = MAX_BLOCKS - 1
    return [index * last_offset // last_index for index in range(MAX_BLOCKS)]


def block_checksums(file: Path) -> tuple[int, ...]:
    """CRC-32 of the sampled blocks of a file."""
    checksums = []
    with file.open("rb") as source:
        for offset in block_offsets(file.stat().st_size):
            source.seek(offset)
            checksums.append(zlib.crc32(source.read(BLOCK_BYTES)))
    return tuple(checksums)


def content_faults(prepared: Prepared, split: Split) -> Iterator[Fault]:
    """What is damaged in the tokens and bounds of a split."""
    for file, sha256 in prepared.files(split):
        try:
            open_regular(file, within=prepared.folder).close()
            is_whole = verified_part(file.stat().st_size) == "whole"
            written = prepared.meta.blocks.get(file.name)
            if is_whole and hash_file(file) != sha256:
                yield _damaged(file, "its SHA-256 is another than meta.json states")
                return
            if not is_whole and written is not None and block_checksums(file) != written:
                yield _damaged(file, "the checksum of a block is another than meta.json states")
                return
        except UnreadableFile as error:
            yield error.fault(KEY, fix=PREPARE_AGAIN)
            return
    bounds_fault = _bounds_fault(prepared, split)
    if bounds_fault is not None:
        yield bounds_fault
        return
    stream = prepared.stream(split, vocab=prepared.meta.vocab)
    try:
        stream.check(0, min(len(stream), SCANNED_TOKENS))
    except DataError as error:
        yield from error.faults


def _bounds_fault(prepared: Prepared, split: Split) -> Fault | None:
    """Why the bounds do not ascend from 0 to the number of tokens."""
    info = prepared.meta.splits[split]
    file = prepared.folder / f"{split}.idx"
    num_bounds = info.documents + 1
    previous = -1
    for start in range(0, num_bounds, BOUNDS_AT_ONCE):
        count = min(BOUNDS_AT_ONCE, num_bounds - start)
        offset = start * BOUND.itemsize
        bounds = np.fromfile(file, BOUND, count, offset=offset)
        first = bounds[0]
        if start == 0 and first != 0:
            return _damaged(file, f"the first document begins at token {first}")
        has_empty = bool((np.diff(bounds) <= 0).any())
        if first <= previous or has_empty:
            return _damaged(file, "the starts of documents do not ascend")
        previous = int(bounds[-1])
    if previous != info.tokens:
        return _damaged(file, f"the last document ends at token {previous} of {info.tokens}")
    return None


def _damaged(file: Path, why: str) -> Fault:
    return Fault(KEY, f"{file} is damaged: {why}", fix=PREPARE_AGAIN)
