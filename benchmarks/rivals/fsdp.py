"""ZeRO against torch's FSDP2 and ZeroRedundancyOptimizer: two data ranks, one micro-batch a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from benchmarks.rivals.course import ADAMW, CLIP, Chain, Course, Step, torch_adamw
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import weft

MESH = "dp2"


def zero_3(course: Course) -> dict[str, Step]:
    """Parameters gathered for each block, forward and again backward."""
    return {
        "fully_shard per block": _fsdp2(course, reshard=True),
        "zero 3, trainer": course.weft_step(micro=course.size.sequences // 2, zero=3),
        "FullyShardedDataParallel, script": _script(course, zero=3),
    }


def zero_2(course: Course) -> dict[str, Step]:
    """Parameters stay between forward and backward (torch) or always (weft)."""
    return {
        "fully_shard, reshard_after_forward=False": _fsdp2(course, reshard=False),
        "zero 2, trainer": course.weft_step(micro=course.size.sequences // 2, zero=2),
        "FullyShardedDataParallel zero=2, script": _script(course, zero=2),
    }


def zero_1(course: Course) -> dict[str, Step]:
    """Optimizer states are spread."""
    return {
        "DDP, ZeroRedundancyOptimizer": _redundancy(course),
        "zero 1, trainer": course.weft_step(micro=course.size.sequences // 2, zero=1),
        "DDP, ShardedOptimizer, script": _sharded_optimizer(course),
    }


LINES = {"zero 3": zero_3, "zero 2": zero_2, "zero 1": zero_1}


def _fsdp2(course: Course, *, reshard: bool) -> Step:
    net = Chain(course.plain_blocks())
    for name, block in net.blocks.items():
        if name != "loss":
            fully_shard(block, reshard_after_forward=reshard)
    fully_shard(net)
    return _loop(course, net, torch_adamw(net.parameters()), _torchs_clip(net))


def _script(course: Course, *, zero: int) -> Step:
    net = weft.FullyShardedDataParallel(Chain(course.plain_blocks()), zero=zero)  # type: ignore[arg-type]
    net.comm.checked = False

    def finish() -> None:
        net.finish_gradient_synchronization()
        net.clip_grad_norm_(CLIP)

    return _loop(course, net, torch_adamw(net.parameters()), finish)


def _redundancy(course: Course) -> Step:
    net = nn.parallel.DistributedDataParallel(Chain(course.plain_blocks()), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **ADAMW)
    return _loop(course, net, optimizer, _torchs_clip(net))


def _sharded_optimizer(course: Course) -> Step:
    net = weft.DistributedDataParallel(Chain(course.plain_blocks()))
    optimizer = weft.ShardedOptimizer(net.parameters(), torch.optim.AdamW, **ADAMW)
    net.comm.checked = optimizer.comm.checked = False

    def finish() -> None:
        net.finish_gradient_synchronization()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)

    return _loop(course, net, optimizer, finish)


def _torchs_clip(net: nn.Module) -> Callable[[], object]:
    return lambda: nn.utils.clip_grad_norm_(net.parameters(), CLIP)


def _loop(course: Course, net: nn.Module, optimizer: object, finish: Callable[[], object]) -> Step:
    """The script that both sides share; the loss is that of all ranks, as a trainer logs it."""
    mine = course.own_rows

    def step() -> float:
        optimizer.zero_grad()
        loss = net(mine)
        loss.backward()
        finish()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / course.comm.mesh.size

    return step
