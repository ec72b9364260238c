"""Comparison of the parameters that a run starts from with their definition: drawn from seed and name, or stored values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from weft.checkpoint.read import Source
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.model_config import InitTable, match_row
from weft.models.common.init import draw
from weft.prove.subject import LiveTask


class InitialValues:
    """Compares whole parameters as they are gathered; ranks take turns, so each parameter is drawn
    on one of them.

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
            turn = len(self._seen) % self.comm.mesh.size
            self._seen.add(owner)
            if turn == self.comm.rank and not self._is_as_defined(owner, value):
                self.unlike_definition.add(owner)

    def _is_as_defined(self, owner: str, value: Tensor) -> bool:
        defined = self._defined(owner, value)
        if torch.equal(defined, value):
            return True
        rounded = defined.to(self.frozen_dtype).to(self.dtype)
        return owner not in self.trained and torch.equal(rounded, value)

    def _defined(self, owner: str, value: Tensor) -> Tensor:
        shape = tuple(value.shape)
        source = self._source
        if source is not None and owner in source.shapes:
            return source.read(owner, Box.whole(shape)).to(value.device, self.dtype)
        rule = match_row(owner, self._table, title="init")
        drawn = draw(owner, shape, rule, seed=self.task.seed, device=value.device)
        return drawn.to(self.dtype)

    @cached_property
    def _source(self) -> Source | None:
        return self.task.open_source()

    @cached_property
    def _table(self) -> InitTable:
        return self.task.family.init(self.task.model)
