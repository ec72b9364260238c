"""Owns gradient buckets: gradients as views into flat memory, reduced during the last backward of their stage.

Note [Bucket order]
    Which parameter lies in which bucket, and the order in which buckets are reduced, is fixed when the buckets are made:
    by reduce axes, then backwards through the chain. It never depends on the order in which gradients happen to arrive, so
    the sums of a resumed run are bit for bit those of the uninterrupted one, and every rank of a group starts its
    collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.transport import Work


@dataclass
class Bucket:
    """Gradients that are reduced together, in one flat tensor.

    Attributes:
        stage: whose last backward completes them.
        axes: mesh axes over which they are summed; empty where no other rank met other tokens.
        names: parameters, in memory order.
        flat: all their gradients, end to end.
        missing: parameters whose gradient of this step is not complete yet.
        work: the reduction under way.
    """

    stage: int
    axes: tuple[str, ...]
    names: tuple[str, ...]
    flat: Tensor
    missing: set[str] = field(default_factory=set)
    work: Work | None = None
    started: bool = False


class GradientBuckets:
    """All gradients of one rank. `params[name].grad` is a view into a bucket from the start and stays one."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        comm: Comm,
        reduce: Mapping[str, tuple[str, ...]],
        stage_of: Mapping[str, int],
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self.comm, self._params = comm, params
        self._trained = {name: param for name, param in params.items() if param.requires_grad}
        self.buckets = tuple(_make_buckets(params, reduce=reduce, stage_of=stage_of, bucket_bytes=bucket_bytes))
        self.views = {name: param.grad for name, param in params.items() if param.grad is not None}
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._armed: set[int] = set()
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
            for name, param in self._trained.items()
        ]

    @property
    def sharded_params(self) -> Mapping[str, Tensor]:
        """What an optimizer moves, by global name, `.grad` beside it."""
        return self._trained

    @property
    def frozen_shards(self) -> Mapping[str, Tensor]:
        """What nobody moves and no rank holds whole: nothing."""
        return {}

    @property
    def shard_axes(self) -> Mapping[str, tuple[str, ...]]:
        """Mesh axes over which the entries of a parameter are spread: none."""
        return {}

    @property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]:
        """Which entries of this rank's piece of a parameter lie in its tensor: all."""
        return {name: (0, param.numel()) for name, param in self._params.items()}

    def after_optimizer_step(self) -> None:
        """The blocks use the very tensors that were moved."""

    def full_gradients(self) -> dict[str, Tensor]:
        """Finished gradients by global name."""
        return {name: view.clone() for name, view in self.views.items()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Values by global name."""
        return {name: param.detach().clone() for name, param in self._params.items()}

    def set_requires_gradient_sync(self, stage: int) -> None:
        """The next backward of `stage` is its last in this step: reduce each bucket as soon as it is complete."""
        self._armed.add(stage)

    def finish(self) -> None:
        """Start what was not started (parameters without a gradient leave their bucket waiting), and wait for all."""
        for bucket in self.buckets:
            self._start(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work, bucket.started, bucket.missing = None, False, set(bucket.names)
        self._armed.clear()

    def zero_grad(self) -> None:
        """Make every gradient 0, before the first backward of a step."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every gradient by `factor` (a number, or a scalar tensor of high precision)."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def _arrived(self, name: str) -> None:
        bucket = self._bucket_of[name]
        if bucket.stage not in self._armed:
            return
        bucket.missing.discard(name)
        for candidate in self.buckets:
            if candidate.stage == bucket.stage and not candidate.started:
                if candidate.missing:
                    return
                self._start(candidate)

    def _start(self, bucket: Bucket) -> None:
        if not bucket.started:
            bucket.started = True
            if bucket.axes:
                bucket.work = self.comm.start_all_reduce_(bucket.flat, bucket.axes)


def _make_buckets(
    params: Mapping[str, nn.Parameter],
    *,
    reduce: Mapping[str, tuple[str, ...]],
    stage_of: Mapping[str, int],
    bucket_bytes: int,
) -> Iterator[Bucket]:
    """Cut the parameters, last first, into runs of equal stage, axes, dtype and device, of at most `bucket_bytes` each."""
    names = [name for name, param in reversed(list(params.items())) if param.requires_grad]

    def key(name: str) -> tuple[int, tuple[str, ...], str, str]:
        return -stage_of[name], reduce[name], str(params[name].dtype), str(params[name].device)

    for (stage, axes, _, _), group in groupby(sorted(names, key=key), key=key):
        for run in _runs(list(group), params, bucket_bytes):
            yield _make_bucket(run, params, stage=-stage, axes=axes)


def _runs(names: Sequence[str], params: Mapping[str, nn.Parameter], most_bytes: int) -> Iterator[tuple[str, ...]]:
    run: list[str] = []
    size = 0
    for name in names:
        nbytes = params[name].numel() * params[name].element_size()
        if run and size + nbytes > most_bytes:
            yield tuple(run)
            run, size = [], 0
        run.append(name)
        size += nbytes
    yield tuple(run)


def _make_bucket(
    names: tuple[str, ...], params: Mapping[str, nn.Parameter], *, stage: int, axes: tuple[str, ...]
) -> Bucket:
    first = params[names[0]]
    flat = torch.zeros(sum(params[name].numel() for name in names), dtype=first.dtype, device=first.device)
    offset = 0
    for name in names:
        param = params[name]
        param.grad = flat[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    return Bucket(stage=stage, axes=axes, names=names, flat=flat, missing=set(names))
