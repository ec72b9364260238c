"""What a proof compares: losses, gradient norms, gradients and parameters of some steps, by global name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.core.axes import Box
from weft.core.shard import Shard
from weft.parallel.model.parallelize import read_shard

MIN_SCALE = 1e-30


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step: logged numbers, the gradients that the optimizer used (after clipping),
    the updated parameters.
    """

    loss: float
    grad_norm: float
    grads: Mapping[str, Tensor]
    params: Mapping[str, Tensor]


@dataclass(frozen=True)
class RankTrace:
    """What one rank computed in some steps, and which shard of each parameter it holds.

    `where` are the coordinates of the rank.
    """

    where: str
    shards: Mapping[str, Shard]
    steps: tuple[StepTrace, ...]


@dataclass(frozen=True)
class TensorDifference:
    """How far a number or tensor of a rank is from the one-device value.

    `relative` is the largest absolute difference over the scale of the one-device values.
    """

    step: int
    what: str
    where: str
    relative: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} on {self.where}: relative difference {self.relative:.2e}"


def differences(
    truth: Sequence[StepTrace],
    ranks: Iterable[RankTrace],
    *,
    lr: float,
) -> list[TensorDifference]:
    """Relative difference of every loss, norm, gradient and parameter on every rank, in order of
    computation.

    A tensor's scale is its largest one-device value. A gradient that is zero in exact arithmetic
    (the key bias of softmax attention) consists of rounding errors and has no scale of its own: the
    scale of a gradient is at least 1e-6 of the step's gradient norm, and that of a parameter at
    least `lr`, the size of one AdamW update.
    """
    found: list[TensorDifference] = []
    for rank in ranks:
        for step, (expected, actual) in enumerate(
            zip(truth, rank.steps, strict=True),
            start=1,
        ):
            found.extend(
                _step_differences(
                    step,
                    expected,
                    actual,
                    rank,
                    lr=lr,
                )
            )
    return sorted(found, key=lambda difference: difference.step)


def _step_differences(
    step: int,
    expected: StepTrace,
    actual: StepTrace,
    rank: RankTrace,
    *,
    lr: float,
) -> Iterator[TensorDifference]:
    yield TensorDifference(
        step,
        "loss",
        rank.where,
        relative_difference(actual.loss, expected.loss),
    )
    yield TensorDifference(
        step,
        "grad_norm",
        rank.where,
        relative_difference(actual.grad_norm, expected.grad_norm),
    )
    for name, value in actual.grads.items():
        shard = _shard_of(expected.grads[name], rank.shards[name])
        relative = _tensor_difference(
            value,
            shard,
            min_scale=1e-6 * expected.grad_norm,
        )
        yield TensorDifference(
            step,
            f"gradient {name}",
            rank.where,
            relative,
        )
    for name, value in actual.params.items():
        shard = _shard_of(expected.params[name], rank.shards[name])
        yield TensorDifference(
            step,
            f"parameter {name}",
            rank.where,
            _tensor_difference(value, shard, min_scale=lr),
        )


def uncovered(whole: Mapping[str, Tensor], ranks: Iterable[RankTrace]) -> list[str]:
    """Names of parameters with entries that no rank holds."""
    shards_of_name: dict[str, set[Shard]] = {}
    for rank in ranks:
        for name, shard in rank.shards.items():
            shards_of_name.setdefault(name, set()).add(shard)
    missing = []
    for name, tensor in whole.items():
        num_held = sum(shard.size for shard in shards_of_name.get(name, ()))
        if num_held != tensor.numel():
            missing.append(name)
    return missing


def relative_difference(actual: float, expected: float) -> float:
    """Absolute difference over the expected magnitude; infinite if a number is NaN."""
    if math.isnan(actual) or math.isnan(expected):
        return math.inf
    return abs(actual - expected) / max(abs(expected), MIN_SCALE)


def _shard_of(whole: Tensor, shard: Shard) -> Tensor:
    def read(box: Box) -> Tensor:
        return whole[box.slices]

    return read_shard(read, shard)


def _tensor_difference(
    actual: Tensor,
    expected: Tensor,
    *,
    min_scale: float,
) -> float:
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    scale = max(expected.abs().max().item(), min_scale, MIN_SCALE)
    relative = (actual - expected).abs().max().item() / scale
    return math.inf if math.isnan(relative) else relative
