"""A Hugging Face folder as a `Source`: parameters by weft's names and shapes, any box, read from memory-mapped files."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.config.hf.mapping import SCORES
from weft.config.hf.safetensors_files import STORED_DTYPES, TensorEntry
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.folder_checks import nonfinite_fault
from weft.hf.match import match_folder
from weft.hf.placement import Copy, ParamSource
from weft.models import FAMILIES
from weft.small_files import UnreadableFile, open_regular

SLAB_ENTRIES = 2**22
"""Entries of a tensor that are read, compared or written at a time."""


class MappedFiles:
    """Safetensors files, mapped into memory at the first read; several threads may read."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read(self, entry: TensorEntry, box: Box) -> Tensor:
        """A view of the entries of `box`; it must be copied before it is changed or kept.

        Raises:
            CheckpointError: the file is gone or cannot be read.
        """
        dtype = torch_dtype(entry)
        if not box.size:
            return torch.empty(box.shape, dtype=dtype)
        count = (entry.stop - entry.start) // dtype.itemsize
        flat = torch.frombuffer(self._map(entry.file), dtype=dtype, count=count, offset=entry.start)
        if entry.swapped is None:
            return flat.view(entry.shape)[box.slices]
        in_file = entry.transposed(*entry.swapped).shape
        return flat.view(in_file).transpose(*entry.swapped)[box.slices]

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = _map_file(file)
            return self._maps[file]


class HfFolder:
    """The parameters of a model, as they lie in a folder of config.json and safetensors.

    Raises:
        CheckpointError: from the constructor: a tensor that is missing, left over, or does not fit;
            every tensor of the files is used exactly once.
    """

    def __init__(self, folder: Path, cfg: ModelConfig) -> None:
        matched = match_folder(folder, cfg)
        self.folder = folder
        self.ties = FAMILIES[cfg.family].ties(cfg)
        self.entries = matched.entries
        self.sources = matched.params
        self.aliases = matched.aliases
        self.notes = matched.notes
        self._files = MappedFiles()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter."""
        return {name: source.shape for name, source in self.sources.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        return self._dtype(self.sources[name])

    def read(self, name: str, box: Box) -> Tensor:
        """Entries of `box`, as stored, in memory of their own.

        Raises:
            CheckpointError: one of them is NaN or infinite.
        """
        source = self.sources[name]
        values = self._assemble(source, box)
        is_finite = torch.isfinite(values)
        if not bool(is_finite.all()):
            tensor = source.tensors[0]
            file = self.entries[tensor].file
            raise CheckpointError(nonfinite_fault(file, tensor))
        return values

    def check_aliases(self) -> None:
        """Check that tied parameters that the files repeat, such as the head of a tied model, equal
        their owner.

        Raises:
            CheckpointError: one does not.
        """
        for alias, source in self.aliases.items():
            owner = self.ties[alias]
            if self._equals(source, owner):
                continue
            tensor = source.rule.tensor
            owner_tensor = self.sources[owner].rule.tensor
            raise CheckpointError(
                Fault(
                    str(self.folder),
                    f"{tensor} differs from {owner_tensor}, and the model ties them",
                    fix="set tie_word_embeddings as the weights are",
                )
            )

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the files hold the parameters of a model with these whole shapes.

        Raises:
            CheckpointError: with every name or shape that differs.
        """
        where = str(self.folder)
        stored = self.shapes
        faults = []
        for name, shape in shapes.items():
            if name in stored and stored[name] != shape:
                what = f"{self.sources[name].rule.tensor}: config.json makes another shape of it"
                faults.append(
                    Fault(where, what, got=str(list(stored[name])), need=str(list(shape)))
                )
            elif name not in stored and name not in SCORES:
                faults.append(Fault(where, f"nothing holds {name}"))
        faults.extend(
            Fault(where, f"{name} is no parameter") for name in stored if name not in shapes
        )
        if faults:
            raise CheckpointError(*faults)

    def _equals(self, source: ParamSource, owner: str) -> bool:
        shape = self.sources[owner].shape
        if source.shape != shape:
            return False
        for box in slabs(shape):
            alias_values = self._assemble(source, box)
            if not torch.equal(alias_values, self.read(owner, box)):
                return False
        return True

    def _assemble(self, source: ParamSource, box: Box) -> Tensor:
        """A box of a parameter, copied from its tensors."""
        copies = list(source.copies(box))
        if source.is_whole:
            view = self._view(copies[0])
            return view.clone(memory_format=torch.contiguous_format)
        dtype = self._dtype(source)
        assembled = torch.empty(box.shape, dtype=dtype)
        for copy in copies:
            assembled[copy.at] = self._view(copy)
        return assembled

    def _view(self, copy: Copy) -> Tensor:
        stored = self._files.read(self.entries[copy.source], copy.box)
        if copy.transposed:
            return stored.T
        return stored

    def _dtype(self, source: ParamSource) -> torch.dtype:
        return torch_dtype(self.entries[source.tensors[0]])


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """torch's type of a stored tensor."""
    name, _ = STORED_DTYPES[entry.dtype]
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def slabs(shape: tuple[int, ...]) -> Iterator[Box]:
    """A tensor split into boxes of `SLAB_ENTRIES` or fewer, in the order in which it lies in a
    file.
    """
    whole = Box.whole(shape)
    if not shape or whole.size <= SLAB_ENTRIES:
        yield whole
        return
    inner = Box.whole(shape[1:])
    num_rows = SLAB_ENTRIES // inner.size
    if num_rows:
        inner_boxes = [inner]
    else:
        inner_boxes = list(slabs(inner.hi))
    step = max(1, num_rows)
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        for below in inner_boxes:
            yield Box(lo=(first, *below.lo), hi=(last, *below.hi))


def _map_file(file: Path) -> mmap.mmap:
    try:
        with open_regular(file, within=file.parent) as opened:
            # ACCESS_COPY: torch wants memory that could be written; nothing is, and nothing would reach the file
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except UnreadableFile as error:
        raise CheckpointError(error.fault()) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(Fault(str(file), "cannot be read", got=str(error))) from error
