"""Comparison of this rank's reduced gradients with whole ones from plain blocks, parameter after parameter."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.prove.bounds import FACTOR, FLOOR, KIND_SHARE
from weft.prove.live_step.compared_numbers import GradientRow
from weft.prove.live_step.entry_sums import compare, largest, norm
from weft.prove.live_step.owner_gradients import GradientNoise
from weft.prove.live_step.whole_params import sum_over_ranks
from weft.prove.relations import relation
from weft.train.step import TrainStep

MOST_KEPT = 4
"""Gradients that look wrong and are kept to say how they relate to the right ones."""
MOST_KEPT_ENTRIES = 2**22


@dataclass(frozen=True)
class LocalGradient:
    """This rank's entries of a reduced gradient: flat, and the boxes of the parameter that they are."""

    entries: Tensor
    boxes: tuple[Box, ...]

    def entries_of(self, whole: Tensor) -> Tensor:
        """The same entries of a whole gradient."""
        parts = [whole[box.slices].reshape(-1) for box in self.boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def local_gradients(step: TrainStep, *, scale: float) -> dict[str, LocalGradient]:
    """This rank's entries of every reduced gradient, by owner, without the loss scale."""
    found = {}
    grads = step.grads
    for name, tensor in grads.sharded_params.items():
        if tensor.grad is None or not step.model.params[name].requires_grad:
            continue
        shard = step.model.shards[name]
        boxes = shard.shard.boxes_of_range(*grads.shard_ranges[name])
        flat = tensor.grad.detach().reshape(-1)
        if boxes and flat.numel():
            found[shard.owner] = LocalGradient(flat if scale == 1 else flat / scale, boxes)
    return found


@dataclass
class GradientRows:
    """Rows of the gradients, in the order in which they come.

    Args:
        scale: loss scale of the whole gradients.
        eps: unit of rounding.
        products: parameters whose gradients are products of matrices.
        routers: weights of routers.
    """

    comm: Comm
    local: dict[str, LocalGradient]
    scale: float
    eps: float
    products: Collection[str] = ()
    routers: Collection[str] = ()
    rows: list[GradientRow] = field(default_factory=list)
    kept: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, owner: str, part: Tensor, noise: GradientNoise) -> None:
        """Add the ranks' parts of the gradient of a parameter, and compare; every rank calls it."""
        whole = sum_over_ranks(self.comm, part)
        if self.scale != 1:
            whole /= self.scale
        difference, of_layout, of_plain = 0.0, 0.0, 0.0
        local = self.local.get(owner)
        if local is not None:
            expected = local.entries_of(whole)
            sums = compare(local.entries, expected)
            difference = sums.largest
            of_plain = sums.norm**2
            of_layout = of_plain + sums.product
        row = GradientRow(
            owner,
            num_entries=whole.numel(),
            difference=difference,
            largest=largest(whole),
            noise=noise.times(1 / self.scale),
            products=(of_layout, of_plain),
            is_product=owner in self.products,
            is_router=owner in self.routers,
            squared_norm=norm(whole) ** 2,
        )
        self.rows.append(row)
        if local is not None and self._looks_wrong(row):
            self.kept[owner] = (local.entries.clone(), expected)

    def _looks_wrong(self, row: GradientRow) -> bool:
        if len(self.kept) >= MOST_KEPT or row.num_entries > MOST_KEPT_ENTRIES:
            return False
        if row.largest <= KIND_SHARE * max(each.largest for each in self.rows):
            return False  # rounding
        return not row.difference <= FACTOR * row.noise.largest + FLOOR * self.eps * row.largest

    def relation_of(self, owner: str) -> str:
        """How this rank's entries of a gradient relate to the right ones; "" where they were not
        kept.
        """
        if owner not in self.kept:
            return ""
        measured, expected = self.kept[owner]
        return relation(measured, expected, candidates={})
