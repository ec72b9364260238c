"""Owns a Hugging Face folder as a `Source`: our names, our shapes, any box, read straight from the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.config.hf.files import DTYPES
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.mapped import MappedFiles
from weft.hf.recipe import Read, Recipe
from weft.hf.tables import match_folder
from weft.models import FAMILIES

BLOCK_ENTRIES = 2**22
"""Entries of a tensor that are compared at a time."""


class HfFolder:
    """The parameters of a model, as they lie in a folder of config.json and safetensors.

    Raises:
        CheckpointError: when it is made: a tensor that is missing, left over, or does not fit; every tensor of the files
            is used exactly once.
    """

    def __init__(self, folder: Path, cfg: ModelConfig) -> None:
        matched = match_folder(folder, cfg)
        self.folder, self.ties = folder, FAMILIES[cfg.family].ties(cfg)
        self.entries, self.recipes, self.repeated = matched.entries, matched.recipes, matched.repeated
        self._files = MappedFiles()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter."""
        return {name: recipe.shape for name, recipe in self.recipes.items()}

    def dtype(self, name: str) -> torch.dtype:
        """As stored."""
        dtype: torch.dtype = getattr(torch, DTYPES[self.entries[self.recipes[name].theirs[0]].dtype][0])
        return dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Entries of `box`, as stored, in memory of their own."""
        return self._made(self.recipes[name], box)

    def check_copies(self) -> None:
        """Aliases that the files repeat, such as the head of a tied model, hold what their owner holds.

        Raises:
            CheckpointError: one does not.
        """
        for alias, recipe in self.repeated.items():
            owner = self.ties[alias]
            shape = self.recipes[owner].shape
            same = recipe.shape == shape and all(
                torch.equal(self._made(recipe, rows), self.read(owner, rows)) for rows in slabs(shape)
            )
            if not same:
                what = f"{recipe.row.theirs} differs from {self.recipes[owner].row.theirs}, and the model ties them"
                raise CheckpointError(Fault(str(self.folder), what, fix="set tie_word_embeddings as the weights are"))

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The files hold the parameters of a model with these whole shapes.

        Raises:
            CheckpointError: with every name or shape that differs.
        """
        own, what = self.shapes, "config.json makes another shape of it"
        faults = [
            Fault(str(self.folder), f"{self.recipes[name].row.theirs}: {what}", str(list(own[name])), str(list(shape)))
            for name, shape in shapes.items()
            if name in own and own[name] != shape
        ]
        faults += [Fault(str(self.folder), f"nothing holds {name}") for name in shapes if name not in own]
        faults += [Fault(str(self.folder), f"{name} is no parameter") for name in own if name not in shapes]
        if faults:
            raise CheckpointError(*faults)

    def _made(self, recipe: Recipe, box: Box) -> Tensor:
        reads = list(recipe.reads(box))
        if not recipe.experts:
            return self._view(reads[0]).clone(memory_format=torch.contiguous_format)
        made = torch.empty(box.shape, dtype=getattr(torch, DTYPES[self.entries[recipe.theirs[0]].dtype][0]))
        for read in reads:
            made[read.at] = self._view(read)
        return made

    def _view(self, read: Read) -> Tensor:
        lies = self._files.read(self.entries[read.theirs], read.box)
        return lies.T if read.transposed else lies


def slabs(shape: tuple[int, ...]) -> Iterator[Box]:
    """A tensor cut into boxes of `BLOCK_ENTRIES` or fewer, in the order in which it lies in a file."""
    whole = Box.whole(shape)
    if not shape or whole.size <= BLOCK_ENTRIES:
        yield whole
        return
    inner = Box.whole(shape[1:])
    rows = BLOCK_ENTRIES // inner.size
    for first in range(0, shape[0], max(1, rows)):
        for below in slabs(inner.hi) if rows == 0 else (inner,):
            yield Box((first, *below.lo), (min(first + max(1, rows), shape[0]), *below.hi))
