"""ZeRO compared with torch's FSDP2 and ZeroRedundancyOptimizer: two data-parallel ranks, one micro-batch a step."""

from __future__ import annotations

import torch
from benchmarks.rivals.training import (
    ADAMW,
    CLIP,
    PlainModel,
    Step,
    Training,
    clip_gradients,
    torch_adamw,
    torch_step,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import weft

MESH = "dp2"


def zero_3(training: Training) -> dict[str, Step]:
    """Parameters are all-gathered for the forward and again for the backward of each block."""
    return {
        "fully_shard per block": _fsdp2_step(training, reshard=True),
        "zero 3, trainer": _trainer_step(training, zero=3),
        "FullyShardedDataParallel, script": _script_step(training, zero=3),
    }


def zero_2(training: Training) -> dict[str, Step]:
    """Whole parameters are kept between forward and backward (torch) or always (weft)."""
    return {
        "fully_shard, reshard_after_forward=False": _fsdp2_step(training, reshard=False),
        "zero 2, trainer": _trainer_step(training, zero=2),
        "FullyShardedDataParallel zero=2, script": _script_step(training, zero=2),
    }


def zero_1(training: Training) -> dict[str, Step]:
    """Only optimizer states are sharded."""
    return {
        "DDP, ZeroRedundancyOptimizer": _zero_redundancy_step(training),
        "zero 1, trainer": _trainer_step(training, zero=1),
        "DDP, ShardedOptimizer, script": _sharded_optimizer_step(training),
    }


COMPARISONS = {"zero 3": zero_3, "zero 2": zero_2, "zero 1": zero_1}


def _trainer_step(training: Training, *, zero: int) -> Step:
    sequences_per_rank = training.size.sequences // training.comm.mesh.size
    return training.weft_step(micro_size=sequences_per_rank, zero=zero)


def _fsdp2_step(training: Training, *, reshard: bool) -> Step:
    net = PlainModel(training.plain_blocks())
    for name, block in net.blocks.items():
        if name != "loss":
            fully_shard(block, reshard_after_forward=reshard)
    fully_shard(net)
    return torch_step(
        training,
        net,
        training.local_rows,
        optimizer=torch_adamw(net.parameters()),
        before_update=lambda: clip_gradients(net),
    )


def _script_step(training: Training, *, zero: int) -> Step:
    net = weft.FullyShardedDataParallel(PlainModel(training.plain_blocks()), zero=zero)  # type: ignore[arg-type]
    net.comm.checked = False

    def before_update() -> None:
        net.clip_grad_norm_(CLIP)

    return torch_step(
        training,
        net,
        training.local_rows,
        optimizer=torch_adamw(net.parameters()),
        before_update=before_update,
    )


def _zero_redundancy_step(training: Training) -> Step:
    model = PlainModel(training.plain_blocks())
    net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(
        training,
        net,
        training.local_rows,
        optimizer=ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **ADAMW),
        before_update=lambda: clip_gradients(net),
    )


def _sharded_optimizer_step(training: Training) -> Step:
    net = weft.DistributedDataParallel(PlainModel(training.plain_blocks()))
    optimizer = weft.ShardedOptimizer(net.parameters(), torch.optim.AdamW, **ADAMW)
    net.comm.checked = False
    optimizer.comm.checked = False

    def before_update() -> None:
        clip_gradients(net)

    return torch_step(
        training,
        net,
        training.local_rows,
        optimizer=optimizer,
        before_update=before_update,
    )
