"""Owns what a proof compares: the losses, norms, gradients and parameters of a few steps, by global name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.core.shard import Shard
from weft.parallel.model.parallelize import read_shard


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step: what was logged, the gradients that the optimizer saw (after clipping), the updated parameters."""

    loss: float
    grad_norm: float
    grads: Mapping[str, Tensor]
    params: Mapping[str, Tensor]


@dataclass(frozen=True)
class Held:
    """What one rank held of each parameter during some steps."""

    where: str
    shards: Mapping[str, Shard]
    steps: tuple[StepTrace, ...]


@dataclass(frozen=True)
class Difference:
    """One number or tensor that is not what one device computes.

    `relative` is the largest absolute difference over the scale of the right values.
    """

    step: int
    what: str
    where: str
    relative: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} on {self.where}: relative difference {self.relative:.2e}"


def differences(truth: Sequence[StepTrace], ranks: Iterable[Held], *, lr: float) -> list[Difference]:
    """Relative difference of every loss, norm, gradient and parameter on every rank, in the order in which they are computed.

    A tensor's scale is its largest right value. A gradient that is zero in exact arithmetic (the key bias of softmax
    attention) consists of rounding alone and has no scale of its own: the scale of a gradient is at least 1e-6 of the
    step's gradient norm, and that of a parameter at least `lr`, the size of one update of AdamW.
    """
    found = []
    for rank in ranks:
        for step, (right, mine) in enumerate(zip(truth, rank.steps, strict=True), start=1):
            found.append(Difference(step, "loss", rank.where, _relative(mine.loss, right.loss)))
            found.append(Difference(step, "grad_norm", rank.where, _relative(mine.grad_norm, right.grad_norm)))
            for kind, theirs, whole, floor in (
                ("gradient", mine.grads, right.grads, 1e-6 * right.grad_norm),
                ("parameter", mine.params, right.params, lr),
            ):
                for name, value in theirs.items():
                    relative = _tensor_relative(
                        value,
                        read_shard(lambda box, whole=whole[name]: whole[box.slices], rank.shards[name]),
                        floor=floor,
                    )
                    found.append(Difference(step, f"{kind} {name}", rank.where, relative))
    return sorted(found, key=lambda difference: difference.step)


def uncovered(whole: Mapping[str, Tensor], ranks: Iterable[Held]) -> list[str]:
    """Names of parameters of which some entries lie on no rank."""
    shards: dict[str, set[Shard]] = {}
    for rank in ranks:
        for name, shard in rank.shards.items():
            shards.setdefault(name, set()).add(shard)
    return [
        name for name, tensor in whole.items() if sum(shard.size for shard in shards.get(name, ())) != tensor.numel()
    ]


def _relative(value: float, want: float) -> float:
    if math.isnan(value) or math.isnan(want):
        return math.inf
    return abs(value - want) / max(abs(want), 1e-30)


def _tensor_relative(value: Tensor, want: Tensor, *, floor: float) -> float:
    if value.shape != want.shape:
        return math.inf
    if not value.numel():
        return 0.0
    scale = max(want.abs().max().item(), floor, 1e-30)
    relative = (value - want).abs().max().item() / scale
    return math.inf if math.isnan(relative) else relative
