"""Gradients of shards: what reductions yield is added to `.grad`, and the hooks of scripts are called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.parallel.zero.sharded_tensor import local_of, sharded


@torch.no_grad()
def add_gradient(shard: nn.Parameter, gradient: Tensor) -> None:
    """Add this rank's entries of a synchronised gradient to `.grad`, as a backward does.

    Hooks of `register_hook` see it first, and may replace it.
    """
    added: Tensor = sharded(shard).with_local(gradient)
    for hook in (shard._backward_hooks or {}).values():
        replaced = hook(added)
        added = added if replaced is None else replaced
    if shard.grad is None:
        shard.grad = added
    else:
        total = local_of(shard.grad).add_(local_of(added))
        shard.grad = sharded(shard).with_local(total)


def call_gradient_hooks(shard: nn.Parameter) -> None:
    """Call the hooks of `register_post_accumulate_grad_hook`."""
    hooks = getattr(shard, "_post_accumulate_grad_hooks", None) or {}
    for hook in tuple(hooks.values()):
        hook(shard)
