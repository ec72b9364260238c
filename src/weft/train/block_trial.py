"""Trial of one block with values: a second run, each sequence alone, sums over sequences and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.models.common.batch import Batch, Extra, activation_of
from weft.models.common.buffer_updates import evaluating, updates_buffers
from weft.models.common.dropout_mode import run_block
from weft.models.user_family import LOSS
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.train.casts import Casts, eps
from weft.train.model_effects import NO_DRAWS, Pure, check_scalar

ROUNDINGS = 64
"""Of a type that a model casts to: as far apart are numbers of another order of computation."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass(frozen=True)
class TrialSizes:
    """The sizes of a trial's batch."""

    rows: int
    length: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RowParts:
    """An activation of the whole batch, of its first sequence, and of the others."""

    whole: Any
    first: Any
    others: Any

    @staticmethod
    def of(x: Any) -> RowParts:
        """The first sequence of an activation, and the rest."""
        first = map_leaves(x, Tensor, lambda tensor: tensor[:1])
        others = map_leaves(x, Tensor, lambda tensor: tensor[1:])
        return RowParts(x, first, others)

    def map(self, act: Callable[[Any], Any]) -> RowParts:
        """The same with another value of each."""
        return RowParts(act(self.whole), act(self.first), act(self.others))


@dataclass(frozen=True)
class BlockTrial:
    """One block with values, and the batch that it can run on.

    Attributes:
        casts: those of the blocks so far.
    """

    pure: Pure
    name: str
    block: nn.Module
    batch: Batch
    sizes: TrialSizes
    casts: Casts

    @property
    def label(self) -> str:
        """The model's label for messages."""
        return self.pure.label

    def run(self, x: RowParts, extra: RowParts, *, is_last: bool) -> tuple[RowParts, RowParts]:
        """What the block hands on, and the sums of extra losses so far.

        Raises:
            PlanError: it computes other numbers on other layouts.
        """
        whole = self.pure(self.name, self.block, x.whole, self.batch)
        self._check_same(whole, self._run_noting_casts(x.whole))
        blocks = {self.name: self.block}
        if not updates_buffers(blocks):
            return self._run_rows(whole, x, extra, is_last=is_last)
        with evaluating(
            blocks
        ):  # in training the sequences of a micro-batch may depend on each other
            whole = self._run(x.whole, self.batch)
            return self._run_rows(whole, x, extra, is_last=is_last)

    def _run_rows(
        self, whole: Any, x: RowParts, extra: RowParts, *, is_last: bool
    ) -> tuple[RowParts, RowParts]:
        """Compare the output for the whole batch with those for its parts."""
        first_row, other_rows = self.batch.rows(slice(0, 1)), self.batch.rows(slice(1, None))
        out = RowParts(whole, self._run(x.first, first_row), self._run(x.others, other_rows))
        extra = RowParts(
            *(
                before + _extra_loss(one)
                for before, one in zip(_items(extra), _items(out), strict=True)
            )
        )
        out = out.map(activation_of)
        if is_last:
            check_scalar(out.whole, self.label)
            self._check_sum(
                out.whole + extra.whole, out.first + extra.first, out.others + extra.others
            )
            reads_tokens = self.batch.fields is None and self.batch.inputs.dim() == 2
            if reads_tokens and not self.batch.inputs.is_floating_point():
                self._check_columns(x.whole)
        elif self.name != LOSS:
            self._check_rows(out)
        return out, extra

    def _run_noting_casts(self, x: Any) -> Any:
        """The output; parameters are trained meanwhile, as what depends on them is noted."""
        trained = [param for param in self.block.parameters() if param.is_floating_point()]
        try:
            for param in trained:
                param.requires_grad_(True)
            with torch.enable_grad(), self.casts:
                return self._run(x, self.batch)
        finally:
            for param in trained:
                param.requires_grad_(False)

    def _run(self, x: Any, batch: Batch) -> Any:
        return run_block(self.name, self.block, x, batch)

    def _check_same(self, first: Any, second: Any) -> None:
        """A second run computes the same: a backward with recomputation relies on it."""
        for one, other in zip(tensors_in(first), tensors_in(second), strict=True):
            if self._differs(other, one):
                what = "computes other numbers on a second run: it reads a clock, or the system's randomness"
                raise PlanError(Fault(f"{self.label}: {self.name}", what, fix=NO_DRAWS))

    def _check_rows(self, out: RowParts) -> None:
        """A sequence does not depend on the others of its batch."""
        for parts in zip(*(tensors_in(one) for one in _items(out)), strict=True):
            whole, first, others = parts
            has_rows = whole.dim() > 0 and len(whole) == self.sizes.rows and len(first) == 1
            if has_rows and self._differs(whole, torch.cat([first, others])):
                raise PlanError(
                    Fault(
                        f"{self.label}: {self.name}",
                        "computes a sequence differently where another one is in the batch",
                        fix="normalise each sequence by itself: nn.LayerNorm, nn.GroupNorm",
                    )
                )

    def _check_sum(self, whole: Tensor, *parts: Tensor) -> None:
        total = sum(parts)
        if self._differs(whole, total):
            raise PlanError(
                Fault(
                    f"{self.label}: the loss",
                    "is no sum over targets",
                    got=f"{float(whole):.4f} for the batch, {float(total):.4f} for the sum of its parts",
                    fix="reduction='sum', without dividing by a number of tokens",
                )
            )

    def _check_columns(self, x: Any) -> None:
        """The loss of the halves of every sequence adds up to that of the whole ones."""
        half = self.batch.inputs.shape[1] // 2
        tensors = list(tensors_in(x))
        if not half or not all(_has_columns(tensor, 2 * half) for tensor in tensors):
            return
        undrawn = replace(self.batch, draw_keys=None)

        def loss_of(columns: slice) -> Tensor:
            def select(tensor: Tensor) -> Tensor:
                return tensor[:, columns]

            loss: Tensor = activation_of(
                self._run(map_leaves(x, Tensor, select), undrawn.window(columns))
            )
            return loss

        self._check_sum(
            loss_of(slice(0, 2 * half)), loss_of(slice(0, half)), loss_of(slice(half, 2 * half))
        )

    def _differs(self, got: Any, want: Any) -> bool:
        """Whether two numbers differ by more than rounding, also to a type that the model itself casts
        to; NaN differs from everything.
        """
        wide_got, wide_want = got.detach().double(), want.detach().double()
        if not wide_want.numel():
            return False
        error = (wide_got - wide_want).abs().max()
        scale = wide_want.abs().max().clamp(min=1.0)
        tolerance = TOLERANCES[self.sizes.dtype]
        if self.casts.coarsest is not None:
            tolerance = max(tolerance, ROUNDINGS * eps(self.casts.coarsest))
        is_close = float(error / scale) <= tolerance
        return not is_close


def _items(rows: RowParts) -> tuple[Any, Any, Any]:
    return rows.whole, rows.first, rows.others


def _extra_loss(out: Any) -> Any:
    has_loss = isinstance(out, Extra) and out.loss is not None
    return out.loss if has_loss else 0.0


def _has_columns(out: Tensor, count: int) -> bool:
    return out.dim() > 1 and out.shape[1] == count
