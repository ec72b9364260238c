"""The first update of a run, compared with the optimizer's formula: each rank its own entries of parameters.

Gradients, their norm and initial values were compared before, so what the formula makes of them, from
fresh state, is what one device computes: entry by entry, to the rounding of one update. From gradients
of another device it would not be: AdamW divides a gradient by its size, so rounding decides the sign of
an update where a gradient is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.config.optimizers import is_user_class, rule_names
from weft.core.dimension import local_update_axes
from weft.prove.bounds import FLOOR, MIN_SCALE
from weft.prove.live_step.compared_numbers import LiveDifference
from weft.prove.live_step.memory import available_bytes
from weft.prove.live_step.meta_chain import MetaChain
from weft.prove.live_step.replica import any_rank
from weft.prove.live_step.whole_params import largest_over_ranks
from weft.prove.plain_optimizers import PlainOptimizer, plain_learning_rate
from weft.prove.plain_rules import PlainAdamW, PlainLion, PlainSGD, PlainUpdate
from weft.prove.record import block_of
from weft.prove.subject import LiveTask
from weft.train.step import TrainStep

ROUNDINGS = 32.0
"""Of the largest change of a parameter: an update is about ten operations."""
PIECE = 2**16
"""Entries that are compared at a time: the temporaries stay in the cache of a CPU."""
BY_ENTRY = (PlainAdamW, PlainLion, PlainSGD)
"""Rules that update an entry by its own gradient."""


@dataclass(frozen=True)
class RowOfRank:
    """This rank's entries of one parameter.

    Attributes:
        excess: largest difference of an entry, less the rounding of its own value.
        change: largest absolute change of an entry by the formula.
        ratio: the change that was made, along the right one.
    """

    excess: float
    change: float
    ratio: float


@dataclass
class OwnUpdates:
    """Values and gradients of this rank's entries before an update, by owner.

    Attributes:
        kept: owners whose update is wrong on this rank.
    """

    step: TrainStep
    optimizer: PlainOptimizer
    before: dict[str, tuple[str, Tensor, Tensor]]
    owners: tuple[str, ...]
    rows: dict[str, RowOfRank] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    @staticmethod
    def before_update(
        step: TrainStep, task: LiveTask, chain: MetaChain, *, scale: float
    ) -> OwnUpdates:
        """Copies of what the update is made of.

        Args:
            scale: loss scale of the gradients.
        """
        shapes = {owner: torch.empty(chain.shapes[owner], device="meta") for owner in chain.trained}
        optimizer = PlainOptimizer(shapes, task.optim, task.family.axes(task.model))
        owners = tuple(owner for owner in shapes if _is_by_entry(optimizer, owner))
        found = OwnUpdates(step, optimizer, {}, owners)
        for name, tensor in step.grads.sharded_params.items():
            owner = step.model.shards[name].owner
            if tensor.grad is not None and tensor.numel() and owner in owners:
                gradient = tensor.grad.detach() / scale
                found.before[owner] = (name, tensor.detach().clone(), gradient)
        return found

    @torch.no_grad()
    def _compare(self, *, lr: float, clip_factor: float) -> None:
        """Compare what the update has made of this rank's entries."""
        for owner in list(self.before):
            name, before, gradient = self.before.pop(owner)
            settings = self.optimizer.settings[owner]
            rule = self.optimizer.rules[settings.optimizer]
            now = self.step.grads.sharded_params[name].detach()
            found = []
            flat = (x.flatten().split(PIECE) for x in (now, before, gradient))
            for made, start, of_piece in zip(*flat, strict=True):
                right = start.clone()
                clipped, state = of_piece * clip_factor, rule.fresh_state(start)
                rate = lr * settings.lr_scale
                rule.update(PlainUpdate(right, clipped, state, rate, settings))
                found.append(_sums(made, right, start))
            self.rows[owner] = _row(torch.stack(found).double())

    def differences(self, number: int, *, total: int, norm: float) -> Sequence[LiveDifference]:
        """Updates that are not those of the formula, on any rank; every rank must call it.

        Args:
            number: of the step, of `total`.
            norm: of its gradients.
        """
        optim = self.optimizer.optim
        lr = plain_learning_rate(number - 1, optim, total)
        self._compare(lr=lr, clip_factor=_clip_factor(norm, optim.clip))
        empty = RowOfRank(0.0, 0.0, 1.0)
        own = [self.rows.get(owner, empty) for owner in self.owners]
        table = [(row.excess, row.change) for row in own]
        comm = self.step.model.comm
        local = torch.tensor(table, dtype=torch.float64, device=comm.device).view(-1, 2)
        found = []
        for owner, row, (excess, change) in zip(
            self.owners, own, largest_over_ranks(comm, local).tolist(), strict=True
        ):
            bound = ROUNDINGS * self._eps * change
            if not row.excess <= bound:
                self.kept.add(owner)
            if not excess <= bound:
                found.append(_difference(owner, excess / max(change, MIN_SCALE), self._eps))
        return found

    @property
    def _eps(self) -> float:
        dtype: torch.dtype = getattr(torch, self.step.model.plan.params)
        return torch.finfo(dtype).eps

    def relation_of(self, owner: str) -> str:
        """How the change on this rank relates to the right one."""
        return f"updated by {self.rows[owner].ratio:.4g} times the right change along it"


def can_compare_updates(step: TrainStep, task: LiveTask) -> bool:
    """Whether formulas of single entries explain updates: in 16 bits parameters round more than they
    change, a user's class is its own definition, and sites replace what they have updated. And
    whether every rank has memory for it, so every rank must call it.
    """
    comm = step.model.comm
    has_users = any(map(is_user_class, rule_names(task.optim)))
    has_formulas = torch.finfo(task.types.params).bits >= 32 and not has_users
    if not has_formulas or comm.degree(local_update_axes()) > 1:
        return False
    return not any_rank(comm, _bytes_of_copies(step) > available_bytes(comm))


def _is_by_entry(optimizer: PlainOptimizer, owner: str) -> bool:
    return isinstance(optimizer.rules[optimizer.settings[owner].optimizer], BY_ENTRY)


def _sums(now: Tensor, right: Tensor, before: Tensor) -> Tensor:
    """Of some entries: largest excess, largest right change, and products of the changes."""
    eps = torch.finfo(right.dtype).eps
    excess = (now - right).abs_() - FLOOR * eps * right.abs()
    change = right - before
    return torch.stack(
        (excess.amax().clamp(min=0), change.abs().amax(), (now - before) @ change, change @ change)
    )


def _row(sums: Tensor) -> RowOfRank:
    """Of the sums of all pieces; NaN is a difference."""
    largest, totals = sums.nan_to_num(nan=math.inf).amax(0).tolist(), sums.sum(0).tolist()
    return RowOfRank(largest[0], largest[1], totals[2] / max(totals[3], MIN_SCALE))


def _difference(owner: str, relative: float, eps: float) -> LiveDifference:
    relation = f"different by {relative:.2g} of the largest change"
    return LiveDifference(
        owner, block_of(owner), owner, "update", relation, relative, ROUNDINGS * eps
    )


def _clip_factor(norm: float, largest_norm: float) -> float:
    """By which gradients of this norm are multiplied; `largest_norm` 0: they are not clipped."""
    return min(1.0, largest_norm / (norm + 1e-6)) if largest_norm > 0 else 1.0


def _bytes_of_copies(step: TrainStep) -> int:
    """Memory for values and gradients before an update."""
    return 2 * sum(each.numel() * each.itemsize for each in step.grads.sharded_params.values())
