"""Owns the load of experts over a whole step: counted over all ranks, logged, and answered by the routers' biases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import data_axes
from weft.models.common.moe import MoE, Router, rebalance


def router_of(block: nn.Module) -> Router:
    """The router of a block that has told a load."""
    return next(module.router for module in block.modules() if isinstance(module, MoE))


def sum_loads(loads: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Tokens that each expert saw, block by block, over all ranks whose tokens differ. int64, so it is exact.

    Ranks that share a pipeline stage bring the same blocks; every one of them must call this.
    """
    if not loads:
        return {}
    total = comm.all_reduce(torch.stack(tuple(loads.values())), data_axes(comm.mesh))
    return dict(zip(loads, total.unbind(0), strict=True))


@torch.no_grad()
def rebalance_routers(blocks: Mapping[str, nn.Module], loads: Mapping[str, Tensor]) -> None:
    """Move each router's bias by the global load of the step, where it has one. Source: Wang et al. 2024."""
    for name, load in loads.items():
        router = router_of(blocks[name])
        if router.bias is not None and router.rate:
            router.bias.copy_(rebalance(router.bias, load, rate=router.rate))


def imbalance(loads: Mapping[str, Tensor]) -> float:
    """Largest load of an expert over the mean load, in the worst of these blocks; 1 is even, 0 where there are none."""
    return max((((load.max() * load.numel()) / load.sum()).item() for load in loads.values()), default=0.0)
