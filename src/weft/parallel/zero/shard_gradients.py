"""Gradients of shards: what reductions yield is added to `.grad`, and the hooks of scripts are called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.parallel.zero.sharded_tensor import ShardedTensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's entries; autograd leaves plain tensors in the place of sharded gradients."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


@torch.no_grad()
def add_gradient(shard: nn.Parameter, gradient: Tensor) -> None:
    """Add this rank's entries of a synchronised gradient to `.grad`, as a backward does.

    Hooks of `register_hook` see it first, and may replace it.
    """
    assert isinstance(shard, ShardedTensor), "wrappers register sharded parameters"
    added = ShardedTensor.of(gradient, shard.entries, shard.group)
    for hook in (shard._backward_hooks or {}).values():
        replaced = hook(added)
        added = added if replaced is None else replaced
    if shard.grad is None:
        shard.grad = added
    else:
        total = local_of(shard.grad).add_(local_of(added))
        shard.grad = ShardedTensor.of(total, shard.entries, shard.group)


def call_gradient_hooks(shard: nn.Parameter) -> None:
    """Call the hooks of `register_post_accumulate_grad_hook`."""
    hooks = getattr(shard, "_post_accumulate_grad_hooks", None) or {}
    for hook in tuple(hooks.values()):
        hook(shard)
