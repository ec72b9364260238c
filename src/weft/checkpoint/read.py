"""Owns an opened checkpoint: any box of any stored tensor, whatever pieces it was cut into, and the proof that all is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.cover import first_flaw
from weft.checkpoint.format import Manifest, Piece, Stored
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.mapped import MappedFile
from weft.checkpoint.verify import share, units
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its manifest and the lengths of its files checked; no tensor is read yet.

    Raises:
        CheckpointError: not a checkpoint, damaged, of a newer format, or data files missing or cut short.
    """
    return Checkpoint(path, read_manifest(path))


class Checkpoint:
    """Files are mapped when they are first needed; what is used of them is checked first."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files: dict[str, MappedFile] = {}

    @property
    def sections(self) -> tuple[str, ...]:
        """ "model", "optim/exp_avg", ..."""
        return self.manifest.sections

    def section(self, name: str) -> Section:
        """The tensors below `name` as a Source, by their global parameter names; empty where there are none."""
        return Section(self, name, self.manifest.section(name))

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Read every byte, or the share `index` of `count` shares of about as many bytes each.

        What has been read is not checked again by later reads of this checkpoint.

        Raises:
            CheckpointError: naming one tensor of every damaged file.
        """
        faults: dict[str, Fault] = {}
        for unit in share(units(self.manifest), index, count):
            if unit.piece.file not in faults:
                try:
                    self.file(unit.piece.file).check(unit.name, unit.stored, unit.piece, block=unit.block)
                except CheckpointError as error:
                    faults[unit.piece.file] = error.faults[0]
        for file in list(self.manifest.files)[index::count]:
            if file not in faults:
                try:
                    self.file(file)
                except CheckpointError as error:
                    faults[file] = error.faults[0]
        if faults:
            raise CheckpointError(*faults.values())

    def file(self, name: str) -> MappedFile:
        """One data file, mapped, its header checked."""
        if name not in self._files:
            facts = self.manifest.files[name]
            self._files[name] = MappedFile(self.path / name, facts, block_bytes=self.manifest.block_bytes)
        return self._files[name]


@dataclass(frozen=True)
class Section:
    """Tensors of one kind: parameters, or one state of the optimizer. A `weft.checkpoint.source.Source`."""

    checkpoint: Checkpoint
    name: str
    stored: Mapping[str, Stored]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every tensor."""
        return {name: stored.shape for name, stored in self.stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        """As stored."""
        return torch_dtype(self._find(name))

    def read(self, name: str, box: Box) -> Tensor:
        """Entries of `box`, in its shape, as stored, in memory of their own on the CPU; only what is needed is read.

        Raises:
            CheckpointError: there is no such tensor or box, or what is read is not what was written.
        """
        stored, full = self._find(name), f"{self.name}/{name}"
        if len(box.lo) != len(stored.shape) or box & Box.whole(stored.shape) != box:
            raise CheckpointError(Fault(full, "has no such entries", str(box), f"within {stored.shape}"))
        needed = [(piece, piece.box & box) for piece in stored.pieces]
        needed = [(piece, part) for piece, part in needed if part.size]
        if flaw := first_flaw(box, [part for _, part in needed]):
            files = ", ".join(sorted({piece.file for piece, _ in needed})) or "no file"
            raise CheckpointError(Fault(str(self.checkpoint.path), f"tensor {full!r}: {flaw}; found in {files}"))
        out = torch.empty(box.shape, dtype=torch_dtype(stored))
        for piece, part in needed:
            out[part.within(box)] = self._part(full, stored, piece, part)
        return out

    def _part(self, name: str, stored: Stored, piece: Piece, part: Box) -> Tensor:
        """A view of `part` of a piece, where it lies in the file."""
        dtype, rows = torch_dtype(stored), _rows(piece.box, part)
        row_bytes = stored.num_bytes(piece) // max(1, rows.of)
        data = self.checkpoint.file(piece.file).piece(
            name, stored, piece, start=rows.lo * row_bytes, stop=rows.hi * row_bytes
        )
        held = Box((piece.lo[0] + rows.lo, *piece.lo[1:]), (piece.lo[0] + rows.hi, *piece.hi[1:])) if piece.lo else part
        return torch.frombuffer(data, dtype=dtype).view(held.shape)[part.within(held)]

    def _find(self, name: str) -> Stored:
        if name not in self.stored:
            some = ", ".join(sorted(self.stored)[:3]) or "nothing"
            what = f"no tensor {name!r} in {self.name!r}"
            raise CheckpointError(Fault(str(self.checkpoint.path), what, f"{some}, ..."))
        return self.stored[name]


@dataclass(frozen=True)
class _Rows:
    lo: int
    hi: int
    of: int


def _rows(box: Box, part: Box) -> _Rows:
    """Rows (entries of the first dim) of `box` that `part` touches; a number has one row."""
    if not box.lo:
        return _Rows(0, 1, 1)
    return _Rows(part.lo[0] - box.lo[0], part.hi[0] - box.lo[0], box.shape[0])


def torch_dtype(stored: Stored) -> torch.dtype:
    """Of a stored tensor."""
    dtype = getattr(torch, stored.dtype)
    assert isinstance(dtype, torch.dtype), f"{stored.dtype} is no type of torch"
    return dtype
