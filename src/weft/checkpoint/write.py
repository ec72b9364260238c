"""Owns writing a checkpoint: each rank its own file, in the background; then one rank makes them a checkpoint, or nothing.

every rank   start_write(tmp, rank, held) ... .wait()      rank-NNNNN.safetensors, rank-NNNNN.json
one rank     commit(tmp, final, facts, ranks=...)          manifest, flush, rename: now it is a checkpoint
             discard(tmp)                                  instead, where a rank failed
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import torch

from weft.checkpoint.disk import free_bytes, refusal, sync_folder, write_whole
from weft.checkpoint.format import (
    DIGEST,
    MANIFEST,
    DataFile,
    Facts,
    Manifest,
    Part,
    Piece,
    Stored,
    StoredDtype,
    data_file_name,
    digest_text,
    part_name,
)
from weft.checkpoint.held import Held, dtype_name
from weft.checkpoint.merge import joined, merged
from weft.checkpoint.shard import BLOCK_BYTES, Slot, block_crcs, lay_out, write_order
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


class Writing:
    """One rank's file on its way to the disk. What went wrong is kept until somebody asks."""

    def __init__(self, tmp: Path, rank: int, held: Sequence[Held]) -> None:
        self.num_bytes = sum(piece.num_bytes for piece in held)
        """Of this rank's pieces, headers not counted."""
        self._error: BaseException | None = None
        self._tmp, self._rank, self._held = tmp, rank, deque(sorted(held, key=lambda piece: write_order(_slot(piece))))
        self._thread = threading.Thread(target=self._write, name=f"save-rank-{rank}", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until all is on the disk.

        Raises:
            CheckpointError: it is not; this rank's files are gone again. Call `discard` when all ranks have ended.
        """
        self._thread.join()
        if self._error:
            raise self._error

    def _write(self) -> None:
        free = 0
        try:
            free = free_bytes(self._tmp)
            _write_rank(self._tmp, self._rank, self._held)
        except OSError as error:
            self._remove()
            self._error = refusal(error, self._tmp, need_bytes=self.num_bytes, free=free)
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._remove()
            self._error = error

    def _remove(self) -> None:
        self._held.clear()
        for name in (data_file_name(self._rank), part_name(self._rank)):
            with suppress(OSError):
                (self._tmp / name).unlink()


def start_write(tmp: Path, rank: int, held: Sequence[Held]) -> Writing:
    """Begin to write this rank's pieces below `tmp`, which is made where it is missing, in a thread.

    The tensors are a snapshot: nobody changes them until this is done. Each is let go of as soon as it is written.

    Raises:
        CheckpointError: a piece is given twice.
    """
    seen = set[tuple[str, Box]]()
    for piece in held:
        if (key := (piece.name, piece.box)) in seen:
            raise CheckpointError(Fault(piece.name, f"rank {rank} holds the same piece twice", str(piece.box)))
        seen.add(key)
    return Writing(tmp, rank, held)


def commit(tmp: Path, final: Path, facts: Facts, *, ranks: int) -> Manifest:
    """Make the files of `ranks` ranks in `tmp` the checkpoint `final`; one rank calls it when all have written.

    Raises:
        CheckpointError: `final` is there already, a rank's file is missing, the pieces do not make up whole tensors, or the
            disk refuses. Nothing but `tmp` has been touched, and it is gone.
    """
    try:
        _refuse_overwriting(final)
        manifest = merged(tmp, facts, ranks=ranks)
        text = manifest.to_json().encode()
        free = free_bytes(tmp)
        try:
            _publish(tmp, final, text, ranks=ranks)
        except OSError as error:
            raise refusal(error, final, need_bytes=len(text), free=free) from error
    except BaseException:
        discard(tmp)
        raise
    return manifest


def discard(tmp: Path) -> None:
    """Remove what was written of a checkpoint that is not to be."""
    shutil.rmtree(tmp, ignore_errors=True)


def _write_rank(tmp: Path, rank: int, held: deque[Held]) -> None:
    tmp.mkdir(parents=True, exist_ok=True)
    slots = [_slot(piece) for piece in held]
    layout = lay_out([slot for slot in slots if slot.num_bytes])
    at, name, tensors = iter(layout.at), data_file_name(rank), dict[str, Stored]()
    with (tmp / name).open("xb") as file:
        file.write(layout.header)
        for slot in slots:
            piece = held.popleft()
            pieces: tuple[Piece, ...] = ()
            if slot.num_bytes:
                crcs = _write_piece(file, piece)
                pieces = (Piece(file=name, at=next(at), lo=piece.box.lo, hi=piece.box.hi, crc32=crcs),)
            tensors[slot.name] = joined(
                slot.name,
                tensors.get(slot.name),
                Stored.model_construct(shape=piece.shape, dtype=slot.dtype, pieces=pieces),
            )
        file.flush()
        os.fsync(file.fileno())
    facts = DataFile(
        num_bytes=layout.num_bytes, header_bytes=len(layout.header), header_crc32=zlib.crc32(layout.header)
    )
    part = Part(rank=rank, block_bytes=BLOCK_BYTES, files={name: facts}, tensors=tensors)
    (tmp / part_name(rank)).write_text(part.to_json())  # read and removed by the commit: the disk need never see it


def _write_piece(file: BinaryIO, piece: Held) -> tuple[int, ...]:
    """Checksums of the blocks, taken while they are at hand."""
    flat = piece.tensor.detach().cpu().contiguous()
    raw = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()
    crcs = []
    for block, crc in block_crcs(raw.data, block_bytes=BLOCK_BYTES):
        file.write(block)
        crcs.append(crc)
    return tuple(crcs)


def _publish(tmp: Path, final: Path, text: bytes, *, ranks: int) -> None:
    """Everything in `tmp` reaches the disk before the one rename that makes it a checkpoint."""
    for rank in range(ranks):
        (tmp / part_name(rank)).unlink()
    write_whole(tmp / MANIFEST, text)
    write_whole(tmp / DIGEST, digest_text(text).encode())
    sync_folder(tmp)
    tmp.rename(final)  # refused by the system where a folder with files has come there meanwhile
    sync_folder(final.parent)
    sync_folder(final.parent.parent)


def _refuse_overwriting(final: Path) -> None:
    if final.exists():
        fix = "choose another out, or move it away"
        raise CheckpointError(Fault(str(final), "there is a checkpoint already, and none is overwritten", fix=fix))


def _slot(piece: Held) -> Slot:
    return Slot(piece.name, piece.box, cast(StoredDtype, dtype_name(piece.tensor.dtype)))
