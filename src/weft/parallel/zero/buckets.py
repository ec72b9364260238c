"""Buckets: trained parameters whose gradients are all-reduced together, for wrappers and for ZeRO 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from weft.comm.comm import Comm
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.sharding_policy import ShardingPolicy

BUCKET_BYTES = 25 * 2**20
"""Default bytes of gradients that are reduced together under ZeRO 0, as torch's
DistributedDataParallel.
"""


class BucketKey(NamedTuple):
    """What the parameters of a bucket have in common."""

    stage: int
    axes: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together, by name, last first."""

    key: BucketKey
    names: list[str]

    def group(
        self,
        params: Mapping[str, nn.Parameter],
        comm: Comm,
        policy: ShardingPolicy,
        *,
        stage_counts: Mapping[str, int],
    ) -> ParamGroup:
        """The group of these parameters, each of which so many stages use."""
        members = {name: params[name] for name in self.names}
        return ParamGroup(
            members,
            comm,
            policy,
            axes=self.key.axes,
            stage=self.key.stage,
            num_stages=max(stage_counts[name] for name in self.names),
        )


def bucket_reducer(
    params: Mapping[str, nn.Parameter],
    comm: Comm,
    *,
    reduce_axes: Mapping[str, tuple[str, ...]],
    stage_of: Mapping[str, int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    grad_scale: float = 1.0,
) -> GradientReducer:
    """All-reduces the gradients of any parameters in buckets, in the dtype that each parameter has.

    Args:
        params: in the order in which the forward uses them; frozen ones are left out.
        reduce_axes: parameter name -> mesh axes over which its gradient is summed.
        stage_of: parameter name -> local pipeline stage whose backward completes its gradient;
            default: one stage.
        grad_scale: factor of each sum: 1 / ranks for the mean.
    """
    stage_of = stage_of or dict.fromkeys(params, 0)
    trained = {name: param for name, param in params.items() if param.requires_grad}
    buckets = buckets_of(
        trained, reduce_axes=reduce_axes, stage_of=stage_of, bucket_bytes=bucket_bytes
    )
    groups: list[ParamGroup] = []
    for bucket in buckets:
        dtype = bucket.key.dtype
        policy = ShardingPolicy(
            zero=0,
            params=dtype,
            compute=dtype,
            reduce=dtype,
            grad_scale=grad_scale,
            keeps_unsharded_grad=True,
        )
        group = bucket.group(trained, comm, policy, stage_counts=dict.fromkeys(trained, 1))
        groups.append(group)
    return GradientReducer(groups, comm)


def buckets_of(
    params: Mapping[str, nn.Parameter],
    *,
    reduce_axes: Mapping[str, tuple[str, ...]],
    stage_of: Mapping[str, int],
    bucket_bytes: int,
) -> list[Bucket]:
    """Parameters, last first, in runs of equal key and at most `bucket_bytes` each; the run that
    completes last comes first.
    """
    filling: dict[BucketKey, list[str]] = {}
    sizes: Counter[BucketKey] = Counter()
    full: list[Bucket] = []
    last_first = reversed(list(params.items()))
    for name, param in last_first:
        num_bytes = param.numel() * param.element_size()
        key = BucketKey(
            stage=stage_of[name], axes=reduce_axes[name], dtype=param.dtype, device=param.device
        )
        if key in filling and sizes[key] + num_bytes > bucket_bytes:
            bucket = Bucket(key, filling.pop(key))
            full.append(bucket)
            sizes[key] = 0
        names = filling.setdefault(key, [])
        names.append(name)
        sizes[key] += num_bytes
    for key, names in filling.items():
        full.append(Bucket(key, names))
    place_of = {name: place for place, name in enumerate(params)}

    def first_place(bucket: Bucket) -> int:
        first_name = bucket.names[-1]
        return place_of[first_name]

    return sorted(full, key=first_place)
