"""Write one rank's data file of a checkpoint in a background thread.

every rank   start_write(tmp, rank, items) ... .wait()     rank-NNNNN.safetensors, rank-NNNNN.json
one rank     commit(tmp, final, facts, ranks=...)          see weft.checkpoint.commit
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from weft.checkpoint.data_file import BLOCK_BYTES, FileEntry, block_crcs, lay_out, write_order
from weft.checkpoint.disk import disk_error, free_bytes
from weft.checkpoint.format import (
    DataFile,
    Piece,
    RankManifest,
    Stored,
    StoredDtype,
    data_file_name,
    rank_manifest_name,
)
from weft.checkpoint.tensor_digest import MODULUS
from weft.checkpoint.write_item import NO_DIGESTS, WriteItem, dtype_name
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


class RankWrite:
    """The background write of one rank's file; an error is raised in `wait`."""

    def __init__(
        self,
        tmp: Path,
        rank: int,
        items: Sequence[WriteItem],
        *,
        digests: Mapping[str, Tensor],
        require_finite: bool = False,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.num_bytes = sum(item.num_bytes for item in items)
        """Bytes of this rank's pieces, without headers."""
        self.cpu_s = 0.0
        """Processor time of the write, once it has ended."""
        self._tmp = tmp
        self._rank = rank
        self._digests = digests
        self._require_finite = require_finite
        self._before = before
        self._items = deque(sorted(items, key=lambda item: write_order(_file_entry(item))))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save-rank-{rank}", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether the write has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            CheckpointError: the write failed and this rank's files are removed. Call `discard` when
                all ranks have ended.
        """
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        free = 0
        start_s = time.thread_time()
        try:
            free = free_bytes(self._tmp)
            if self._before is not None:
                self._before()
                self._before = None
            if self._require_finite:
                _check_finite(self._items)
            _write_rank(self._tmp, self._rank, self._items, digests=self._digests)
        except OSError as error:
            self.remove_files()
            self._error = disk_error(error, self._tmp, need_bytes=self.num_bytes, free=free)
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self.remove_files()
            self._error = error
        self.cpu_s = time.thread_time() - start_s

    def remove_files(self) -> None:
        """Remove what this rank has written, once the write has ended."""
        self._items.clear()
        for name in (data_file_name(self._rank), rank_manifest_name(self._rank)):
            with suppress(OSError):
                (self._tmp / name).unlink()


def start_write(
    tmp: Path,
    rank: int,
    items: Sequence[WriteItem],
    *,
    digests: Mapping[str, Tensor] = NO_DIGESTS,
    require_finite: bool = False,
    before: Callable[[], None] | None = None,
) -> RankWrite:
    """Start to write this rank's pieces below `tmp` (created if missing) in a thread.

    The tensors must be a snapshot that does not change until the write is done. Each is released
    once it is written.

    Args:
        digests: stored name -> digest of what this rank holds of it.
        require_finite: fail, before anything is written, if an item holds NaN or infinity.
        before: called in the thread before a tensor is read; it waits until they hold the values.

    Raises:
        CheckpointError: a piece is given twice.
    """
    seen: set[tuple[str, Box]] = set()
    for item in items:
        key = (item.name, item.box)
        if key in seen:
            raise CheckpointError(
                Fault(item.name, f"rank {rank} holds the same piece twice", got=str(item.box))
            )
        seen.add(key)
    return RankWrite(
        tmp, rank, items, digests=digests, require_finite=require_finite, before=before
    )


def merge_stored(name: str, known: Stored | None, other: Stored) -> Stored:
    """One `Stored` with the pieces of both.

    Raises:
        CheckpointError: shape or dtype differ.
    """
    if known is None:
        return other
    if (known.shape, known.dtype) != (other.shape, other.dtype):
        got = f"{other.dtype} of shape {other.shape}"
        need = f"{known.dtype} of shape {known.shape}"
        raise CheckpointError(
            Fault(name, "pieces of different tensors have the same name", got=got, need=need)
        )
    return known.model_copy(update={"pieces": (*known.pieces, *other.pieces)})


def _check_finite(items: Iterable[WriteItem]) -> None:
    """Reject NaN and infinity: a run must not resume from them, and they must not replace an older
    checkpoint.
    """
    for item in items:
        tensor = item.tensor
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        smallest, largest = tensor.aminmax()  # NaN if an entry is NaN
        if not (smallest.isfinite() and largest.isfinite()):
            what = "holds values that are not finite, so the checkpoint is not written"
            raise CheckpointError(Fault(item.name, what, got=str(item.box)))


def _write_rank(
    tmp: Path, rank: int, items: deque[WriteItem], *, digests: Mapping[str, Tensor]
) -> None:
    """Write the data file of `items`, in their order, and the rank's part of the manifest."""
    tmp.mkdir(parents=True, exist_ok=True)
    file_name = data_file_name(rank)
    layout = lay_out([_file_entry(item) for item in items if item.num_bytes])
    offsets = iter(layout.offsets)
    tensors: dict[str, Stored] = {}
    # Never over a file: of two writers of one rank the second one fails.
    with (tmp / file_name).open("xb") as file:
        file.write(layout.header)
        while items:
            # Taken out, so that the copy is freed once it is written: the file grows as memory shrinks.
            item = items.popleft()
            pieces: tuple[Piece, ...] = ()
            if item.num_bytes:
                crcs = _write_piece(file, item)
                piece = Piece(
                    file=file_name, at=next(offsets), lo=item.box.lo, hi=item.box.hi, crc32=crcs
                )
                pieces = (piece,)
            dtype = _stored_dtype(item)
            stored = Stored.model_construct(shape=item.shape, dtype=dtype, pieces=pieces)
            name = item.name
            tensors[name] = merge_stored(name, tensors.get(name), stored)
        file.flush()
        os.fsync(file.fileno())
    data_file = DataFile(
        num_bytes=layout.num_bytes,
        header_bytes=len(layout.header),
        header_crc32=zlib.crc32(layout.header),
    )
    manifest = RankManifest(
        rank=rank,
        block_bytes=BLOCK_BYTES,
        files={file_name: data_file},
        tensors=tensors,
        digests={name: int(digest) % MODULUS for name, digest in digests.items()},
    )
    # Read and removed by `commit`, so it needs no flush to the disk.
    (tmp / rank_manifest_name(rank)).write_text(manifest.to_json())


def _write_piece(file: BinaryIO, item: WriteItem) -> tuple[int, ...]:
    """Write the bytes of a piece; returns the checksum of every block."""
    contiguous = item.tensor.detach().cpu().contiguous()
    num_entries = contiguous.numel()
    flat = contiguous.as_strided((num_entries,), (1,))
    raw = flat.view(torch.uint8).numpy()
    crcs = []
    for block, crc in block_crcs(raw.data, block_bytes=BLOCK_BYTES):
        file.write(block)
        crcs.append(crc)
    return tuple(crcs)


def _file_entry(item: WriteItem) -> FileEntry:
    return FileEntry(name=item.name, box=item.box, dtype=_stored_dtype(item))


def _stored_dtype(item: WriteItem) -> StoredDtype:
    return cast(StoredDtype, dtype_name(item.tensor.dtype))
