"""Owns reading boxes of tensors in safetensors files: mapped into memory, so that only what is asked for is read."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import torch
from torch import Tensor

from weft.config.hf.files import DTYPES, Entry
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


class MappedFiles:
    """Safetensors files that are opened when they are first read; several threads may read."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read(self, entry: Entry, box: Box) -> Tensor:
        """A view of the entries of `box`; it must be copied before it is changed or kept.

        Raises:
            CheckpointError: the file is gone or cannot be read.
        """
        dtype: torch.dtype = getattr(torch, DTYPES[entry.dtype][0])
        if not box.size:
            return torch.empty(box.shape, dtype=dtype)
        count = (entry.stop - entry.start) // dtype.itemsize
        flat = torch.frombuffer(self._map(entry.file), dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)[box.slices]

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = _open(file)
            return self._maps[file]


def _open(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            # ACCESS_COPY: torch wants memory that could be written; nothing is, and nothing would reach the file
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(Fault(str(file), "cannot be read", str(error))) from error
