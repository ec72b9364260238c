"""Read a checkpoint: any box of any stored tensor, whichever layout wrote it, and verification of all bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.coverage import coverage_flaw
from weft.checkpoint.data_file import MappedFile
from weft.checkpoint.format import Manifest, Piece, Stored
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.quantized import NF4_SECTIONS, DequantizedSource
from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, with its manifest and file lengths checked; no tensor is read yet.

    Raises:
        CheckpointError: not a checkpoint, damaged, of a newer format, or data files missing or cut
            short.
    """
    return Checkpoint(path, read_manifest(path))


class Checkpoint:
    """An opened checkpoint. Files are mapped on first use; every block is verified before its first
    use.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._files: dict[str, MappedFile] = {}

    @property
    def sections(self) -> tuple[str, ...]:
        """ "model", "optim/exp_avg", ..."""
        return self.manifest.sections

    def section(self, name: str) -> Source:
        """The tensors below `name` as a Source, by global parameter name; empty if there are none.
        Those of the model that are held in 4 bits are dequantized.
        """
        found = self._section(name)
        packed = tuple(self._section(each) for each in NF4_SECTIONS)
        if name != "model" or not any(source.stored for source in packed):
            return found
        precision = self.manifest.facts.run.get("precision", {})
        compute: torch.dtype = getattr(torch, precision.get("compute", "float32"))
        return DequantizedSource(found, packed, compute)

    def _section(self, name: str) -> Section:
        return Section(checkpoint=self, name=name, stored=self.manifest.section(name))

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Verify every byte, or share `index` of `count` shares with about as many bytes each.

        Verified blocks are not verified again by later reads of this checkpoint.

        Raises:
            CheckpointError: names one tensor of every damaged file.
        """
        faults: dict[str, Fault] = {}
        for block in share_of(blocks_of(self.manifest), index, count):
            file_name = block.piece.file
            if file_name in faults:
                continue
            try:
                self.file(file_name).verify_block(
                    block.name, block.stored, block.piece, block=block.index
                )
            except CheckpointError as error:
                faults[file_name] = error.faults[0]
        for file_name in list(self.manifest.files)[
            index::count
        ]:  # headers, also of files without pieces
            if file_name in faults:
                continue
            try:
                self.file(file_name)
            except CheckpointError as error:
                faults[file_name] = error.faults[0]
        if faults:
            raise CheckpointError(*faults.values())

    def file(self, name: str) -> MappedFile:
        """One data file, mapped, with its header checked."""
        if name not in self._files:
            facts = self.manifest.files[name]
            self._files[name] = MappedFile(
                self.path / name, facts, block_bytes=self.manifest.block_bytes
            )
        return self._files[name]


@dataclass(frozen=True)
class Section:
    """A `Source`: the tensors of one kind in a checkpoint, parameters or one optimizer state."""

    checkpoint: Checkpoint
    name: str
    stored: Mapping[str, Stored]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every tensor."""
        return {name: stored.shape for name, stored in self.stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        return torch_dtype(self._find(name))

    def read(self, name: str, box: Box) -> Tensor:
        """The entries of `box`, in its shape and stored dtype, in new memory on the CPU; reads only
        what is needed.

        Raises:
            CheckpointError: the tensor or box does not exist, or the bytes are not those that were
                written.
        """
        stored = self._find(name)
        stored_name = f"{self.name}/{name}"
        if len(box.lo) != len(stored.shape) or box & Box.whole(stored.shape) != box:
            raise CheckpointError(
                Fault(
                    stored_name, "has no such entries", got=str(box), need=f"within {stored.shape}"
                )
            )
        overlaps: list[tuple[Piece, Box]] = []
        for piece in stored.pieces:
            overlap = piece.box & box
            if overlap.size:
                overlaps.append((piece, overlap))
        self._check_coverage(stored_name, box, overlaps)
        # Every entry is written below: the boxes cover it, as has been checked.
        out = torch.empty(box.shape, dtype=torch_dtype(stored))
        for piece, overlap in overlaps:
            out[overlap.within(box)] = self._read_piece(stored_name, stored, piece, overlap)
        return out

    def _check_coverage(
        self, stored_name: str, box: Box, overlaps: Sequence[tuple[Piece, Box]]
    ) -> None:
        flaw = coverage_flaw(box, [overlap for _, overlap in overlaps])
        if flaw is not None:
            names = sorted({piece.file for piece, _ in overlaps})
            files = ", ".join(names) or "no file"
            what = f"tensor {stored_name!r}: {flaw}; found in {files}"
            raise CheckpointError(Fault(str(self.checkpoint.path), what))

    def _read_piece(self, stored_name: str, stored: Stored, piece: Piece, box: Box) -> Tensor:
        """A view of `box`, a part of one piece, on the mapped file."""
        file = self.checkpoint.file(piece.file)
        dtype = torch_dtype(stored)
        num_bytes = stored.num_bytes(piece)
        if not piece.lo:  # a scalar
            data = file.read(stored_name, stored, piece, start=0, stop=num_bytes)
            return torch.frombuffer(data, dtype=dtype).view(())
        num_rows = piece.hi[0] - piece.lo[0]
        row_bytes = num_bytes // max(1, num_rows)
        first_row = box.lo[0] - piece.lo[0]
        end_row = box.hi[0] - piece.lo[0]
        data = file.read(
            stored_name, stored, piece, start=first_row * row_bytes, stop=end_row * row_bytes
        )
        rows = Box(lo=(box.lo[0], *piece.lo[1:]), hi=(box.hi[0], *piece.hi[1:]))
        entries = torch.frombuffer(data, dtype=dtype).view(rows.shape)
        return entries[box.within(rows)]

    def _find(self, name: str) -> Stored:
        if name not in self.stored:
            some_names = ", ".join(sorted(self.stored)[:3]) or "nothing"
            what = f"no tensor {name!r} in {self.name!r}"
            raise CheckpointError(Fault(str(self.checkpoint.path), what, got=f"{some_names}, ..."))
        return self.stored[name]


def torch_dtype(stored: Stored) -> torch.dtype:
    """The torch dtype of a stored tensor."""
    dtype = getattr(torch, stored.dtype)
    assert isinstance(dtype, torch.dtype), f"{stored.dtype} is not a torch dtype"
    return dtype


@dataclass(frozen=True)
class ChecksumBlock:
    """One checksum block of one piece: the unit of verification."""

    name: str
    stored: Stored
    piece: Piece
    index: int

    @property
    def num_bytes(self) -> int:
        """Mean size of the blocks of this piece, bytes."""
        return self.stored.num_bytes(self.piece) // len(self.piece.crc32)


def blocks_of(manifest: Manifest) -> Sequence[ChecksumBlock]:
    """All blocks of all pieces, sorted by file and offset."""
    blocks: list[ChecksumBlock] = []
    for name, stored in manifest.tensors.items():
        for piece in stored.pieces:
            blocks.extend(
                ChecksumBlock(name=name, stored=stored, piece=piece, index=index)
                for index in range(len(piece.crc32))
            )
    return sorted(blocks, key=lambda block: (block.piece.file, block.piece.at, block.index))


def share_of(blocks: Sequence[ChecksumBlock], index: int, count: int) -> Iterator[ChecksumBlock]:
    """Share `index` of `count`: neighbouring blocks, about as many bytes in each share."""
    total_bytes = max(1, sum(block.num_bytes for block in blocks))
    bytes_before = 0
    for block in blocks:
        if bytes_before * count // total_bytes == index:
            yield block
        bytes_before += block.num_bytes
