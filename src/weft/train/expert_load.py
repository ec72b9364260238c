"""Expert load of a step: tokens per expert summed over all ranks, its imbalance, and the update of router biases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.dimension import token_axes
from weft.models.common.moe import MoE, Router, rebalance


def router_of(block: nn.Module) -> Router:
    """The router of a block with experts."""
    for module in block.modules():
        if isinstance(module, MoE):
            return module.router
    raise AssertionError("a block that reports an expert load has an MoE module")


def sum_loads(loads: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Tokens per expert (int64, exact), by block, summed over all ranks with different tokens.

    Ranks of one pipeline stage hold the same blocks; every one of them must call this.
    """
    if not loads:
        return {}
    local = torch.stack(tuple(loads.values()))
    total = comm.all_reduce(local, token_axes())
    return dict(zip(loads, total.unbind(0), strict=True))


@torch.no_grad()
def rebalance_routers(blocks: Mapping[str, nn.Module], loads: Mapping[str, Tensor]) -> None:
    """Update each router's bias, where it has one, by the global load of the step. Source: Wang et
    al. 2024.
    """
    for name, load in loads.items():
        block = blocks[name]
        router = router_of(block)
        bias = router.bias
        if bias is None or not router.rate:
            continue
        new_bias = rebalance(bias, load, rate=router.rate)
        bias.copy_(new_bias)


def imbalance(loads: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Largest over mean load of an expert, in the worst block, scalar on `device`; 1 is balanced, 0
    without experts.
    """
    if not loads:
        return torch.zeros((), device=device)
    ratios: list[Tensor] = []
    for load in loads.values():
        scaled_max = load.max() * load.numel()
        ratios.append(scaled_max / load.sum())
    by_block = torch.stack(ratios).nan_to_num(0.0)
    return by_block.max()
