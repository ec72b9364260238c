"""Random projections of block outputs, one number for each sequence: ranks compare outputs that no rank holds whole.

The projection of the output x_SD of a sequence is sum over s, d of a_s x_sd b_d, with normal numbers
a and b that depend on positions alone. Two outputs with one projection are equal, but for chance;
that of a part is the part's summand, wherever the part lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch, activation_of
from weft.prove.places import RankPlaces

COLUMN_SEED, FEATURE_SEED = 11, 12


class Projection:
    """The numbers of a projection, drawn once for each length.

    Args:
        seq_len: columns of a whole sequence; None where samples have none.
    """

    def __init__(self, seq_len: int | None, device: torch.device) -> None:
        self.seq_len = seq_len
        self.device = device
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def rows(self, x: Tensor, columns: Sequence[int] | None, *, first_feature: int = 0) -> Tensor:
        """The projection of each row of x, float64.

        Args:
            columns: of the whole sequence that dim 1 of x holds; None: all dims but the first are
                features.
            first_feature: of the whole output that x holds.
        """
        features = self.features(x, columns is not None)
        stop = first_feature + features.shape[-1]
        weights = self._normal(FEATURE_SEED, stop)[first_feature:]
        of_columns = features.double() @ weights
        if columns is not None:
            assert self.seq_len is not None, "only sequences have columns"
            of_columns = of_columns @ self._normal(COLUMN_SEED, self.seq_len)[list(columns)]
        found: Tensor = of_columns
        return found

    @staticmethod
    def features(x: Tensor, has_columns: bool) -> Tensor:
        """x as rows and features, or rows, columns and features."""
        x = x.detach()
        if not has_columns:
            return x.flatten(1)
        return x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)

    def has_columns(self, x: Tensor) -> bool:
        """Whether x holds whole sequences in dim 1."""
        return self.seq_len is not None and x.dim() > 1 and x.shape[1] == self.seq_len

    def whole_rows(self, x: Tensor) -> Tensor:
        """The projection of each whole sequence."""
        return self.rows(x, range(self.seq_len or 0) if self.has_columns(x) else None)

    def _normal(self, seed: int, length: int) -> Tensor:
        """Normal numbers; those of a shorter length are the first ones of a longer one."""
        key = (seed, length)
        if key not in self._drawn:
            generator = np.random.default_rng(seed)
            drawn = torch.from_numpy(generator.standard_normal(length))
            self._drawn[key] = drawn.to(self.device)
        return self._drawn[key]


def output_tensors(output: Any) -> tuple[Tensor, ...]:
    """What a block hands on: one tensor, or several; () for a loss."""
    x = activation_of(output)
    if isinstance(x, tuple):
        return x
    if not isinstance(x, Tensor) or x.dim() == 0:
        return ()
    return (x,)


class OutputSketches:
    """Sums of projections of the block outputs of one rank, by block and sequence of the step.

    Whether an output is whole or a rank's part of the vocabulary shows only when the width on one
    device is known, so both are kept: see `resolved`.

    Args:
        vocab: width of an output whose features may be sharded; 0: there is none.
    """

    def __init__(
        self,
        names: Sequence[str],
        places: RankPlaces,
        projection: Projection,
        device: torch.device,
        *,
        vocab: int,
    ) -> None:
        self.places = places
        self.projection = projection
        self.vocab = vocab
        shape = (2, 2, len(names), places.plan.global_size)
        self._tables = torch.zeros(shape, dtype=torch.float64, device=device)
        self._index = {name: index for index, name in enumerate(names)}
        self._columns = places.columns()
        self._widths: dict[str, int] = {}

    def resolved(self, widths: Mapping[str, int]) -> Tensor:
        """[2, blocks, sequences]: sums, and copies of a whole sequence that were added: over all
        ranks 2 where two tensor-parallel ranks hold the same output.

        Args:
            widths: features of the output of each block on one device.
        """
        whole, parts = self._tables.unbind(0)
        found: Tensor = whole.clone()
        for name, width in self._widths.items():
            if width != widths.get(name):
                index = self._index[name]
                found[:, index] = parts[:, index]
        return found

    @contextmanager
    def watch(self, blocks: Mapping[str, nn.Module], batches: Sequence[Batch]) -> Iterator[None]:
        """Add the outputs of these blocks for these micro-batches, in their order."""
        numbers = {id(batch): number for number, batch in enumerate(batches)}
        names: dict[int, list[str]] = {}
        modules: dict[int, nn.Module] = {}
        for name, block in blocks.items():
            names.setdefault(id(block), []).append(name)
            modules[id(block)] = block
        handles = []
        for key, module in modules.items():
            hooks = _BlockHooks(self, names[key], numbers)
            handles.append(module.register_forward_pre_hook(hooks.before, prepend=True))
            handles.append(module.register_forward_hook(hooks.after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add(self, name: str, micro_batch: int, outputs: Sequence[Tensor]) -> None:
        """Add the outputs of a block for a micro-batch."""
        rows = list(self.places.rows(micro_batch))
        index = self._index[name]
        for place, x in enumerate(outputs):
            columns = self._columns_of(x)
            share = 1.0
            if columns is not None and self.projection.seq_len:
                share = len(columns) / self.projection.seq_len
            width = self.projection.features(x, columns is not None).shape[-1]
            copies = [share, share * width / self.vocab if self.vocab else 0.0]
            for kind, first in enumerate((0, self._first_feature(width))):
                if first is None:
                    continue
                found = self.projection.rows(x, columns, first_feature=first)
                self._tables[kind, 0, index, rows] += (1 + place) * found
                if place == 0:
                    self._tables[kind, 1, index, rows] += copies[kind]
            if place == 0:
                self._widths[name] = width

    def _first_feature(self, width: int) -> int | None:
        """The first of this rank's features, if these are its part of the vocabulary."""
        place = self.places.micro_batch(0, ())
        if not self.vocab or place.activation_degree == 1:
            return None
        chunks = torch.arange(self.vocab).tensor_split(place.activation_degree)
        chunk = chunks[place.activation_index]
        return int(chunk[0]) if len(chunk) == width else None

    def _columns_of(self, x: Tensor) -> list[int] | None:
        """Columns of the whole sequence in dim 1: this rank's, or a chunk of them under sequence
        parallelism.
        """
        columns = self._columns
        if columns is None or x.dim() < 2:
            return None
        if x.shape[1] == len(columns):
            return list(columns)
        place = self.places.micro_batch(0, x.shape)
        chunks = torch.tensor(columns).tensor_split(place.activation_degree)
        chunk: list[int] = chunks[place.activation_index].tolist()
        return chunk if x.shape[1] == len(chunk) else None


class _BlockHooks:
    """Hooks of a module that is one block, or several, called in turn.

    Args:
        numbers: id of a batch -> number of the micro-batch.
    """

    def __init__(
        self, sketches: OutputSketches, names: Sequence[str], numbers: Mapping[int, int]
    ) -> None:
        self.sketches = sketches
        self.names = names
        self.numbers = numbers
        self._micro_batch: int | None = None
        self._calls: Counter[int] = Counter()

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the micro-batch, before other hooks take the batch away."""
        self._micro_batch = self.numbers.get(id(args[1])) if len(args) > 1 else None

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Add the output."""
        number = self._micro_batch
        if number is None:
            return
        turn = self._calls[number]
        self._calls[number] += 1
        name = self.names[turn % len(self.names)]
        self.sketches.add(name, number, output_tensors(output))
