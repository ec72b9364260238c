"""Comparison of the parameters that a run starts from with their definition: drawn from seed and name, or stored values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.dimension import exact_axes
from weft.core.model_config import InitTable, match_row
from weft.models.common.init import draw
from weft.models.common.nf4 import quantized_matrices
from weft.prove.plain_nf4 import quantized_plainly
from weft.prove.subject import LiveTask


class InitialValues:
    """Compares whole parameters as they are gathered; each rank draws an equal part of each.

    Args:
        dtype: of trained parameters.
        frozen_dtype: in which ranks hold those that are not trained.
        trained: owners with gradients.

    Attributes:
        unlike_definition: owners whose values are others.
    """

    def __init__(
        self,
        task: LiveTask,
        comm: Comm,
        *,
        dtype: torch.dtype,
        frozen_dtype: torch.dtype,
        trained: Collection[str],
        is_checked: bool,
    ) -> None:
        self.task = task
        self.comm = comm
        self.dtype = dtype
        self.frozen_dtype = frozen_dtype
        self.trained = frozenset(trained)
        self.unlike_definition: set[str] = set()
        self._is_checked = is_checked
        self._seen: set[str] = set()

    def compare(self, whole: Mapping[str, Tensor]) -> None:
        """Compare the parameters of this rank's turns; every rank calls it with the same names."""
        if not self._is_checked:
            return
        for owner, value in whole.items():
            if owner in self._seen:
                continue
            box = self._box_of_rank(owner, tuple(value.shape))
            self._seen.add(owner)
            if box is not None and not self._is_as_defined(owner, value, box):
                self.unlike_definition.add(owner)

    def _box_of_rank(self, owner: str, shape: tuple[int, ...]) -> Box | None:
        """This rank's part of a parameter: some rows of one that is drawn by entry; with others the
        ranks of a replica take turns.
        """
        rank, num_ranks = self.comm.index(exact_axes()), self.comm.degree(exact_axes())
        if not shape or not self._is_drawn_by_entry(owner):
            return Box.whole(shape) if len(self._seen) % num_ranks == rank else None
        rows = (shape[0] * rank // num_ranks, shape[0] * (rank + 1) // num_ranks)
        return Box.of_spans((rows, *((0, size) for size in shape[1:])))

    def _is_drawn_by_entry(self, owner: str) -> bool:
        is_stored = self._source is not None and owner in self._source.shapes
        if quantized_matrices(self.task.family, self.task.model).get(owner) == 0:
            return False  # blocks run along columns, of which a part of the rows says nothing
        return not is_stored and match_row(owner, self._table, title="init")[0] != "own"

    def _is_as_defined(self, owner: str, whole: Tensor, box: Box) -> bool:
        value = whole[box.slices]
        defined = self._defined(owner, whole, box)
        if torch.equal(defined, value):
            return True
        rounded = defined.to(self.frozen_dtype).to(self.dtype)
        return owner not in self.trained and torch.equal(rounded, value)

    def _defined(self, owner: str, whole: Tensor, box: Box) -> Tensor:
        task = self.task
        value = self._unquantized(owner, whole, box)
        return quantized_plainly(owner, value, task.family, task.model, quantize=task.quantize)

    def _unquantized(self, owner: str, whole: Tensor, box: Box) -> Tensor:
        source = self._source
        if source is not None and owner in source.shapes:
            return source.read(owner, box).to(whole.device, self.dtype)
        rule = match_row(owner, self._table, title="init")
        shape, seed = tuple(whole.shape), self.task.seed
        drawn = draw(owner, shape, rule, seed=seed, box=box, device=whole.device)
        return drawn.to(self.dtype)

    @cached_property
    def _source(self) -> Source | None:
        return self.task.open_source()

    @cached_property
    def _table(self) -> InitTable:
        return self.task.family.init(self.task.model)
