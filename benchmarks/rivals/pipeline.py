"""Pipeline parallelism compared with torch.distributed.pipelining: same stages, 8 micro-batches, 1F1B and interleaved."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.rivals.training import CLIP, Step, Training, torch_adamw
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from weft.layout.plan import make_stages
from weft.models.common.batch import Batch, chain

MESH = "pp2"
NUM_MICRO_BATCHES = 8


def one_f_one_b(training: Training) -> dict[str, Step]:
    """One stage a rank."""
    return {
        "pipelining.Schedule1F1B": _pipelining_step(training, chunks=1),
        "pp2 1f1b, trainer": _trainer_step(training, "1f1b", chunks=1),
    }


def interleaved(training: Training) -> dict[str, Step]:
    """Two stages a rank."""
    return {
        "pipelining.ScheduleInterleaved1F1B": _pipelining_step(training, chunks=2),
        "pp2 interleaved, trainer": _trainer_step(training, "interleaved", chunks=2),
    }


COMPARISONS = {"1f1b": one_f_one_b, "interleav": interleaved}


def _micro_size(training: Training) -> int:
    """Sequences of a micro-batch."""
    return training.size.sequences // NUM_MICRO_BATCHES


def _trainer_step(training: Training, schedule: str, *, chunks: int) -> Step:
    return training.weft_step(
        micro_size=_micro_size(training),
        schedule=schedule,
        chunks=chunks,
    )


class _StageModule(nn.Module):
    """The blocks of one stage; positions come from `example`, which has the shape of every micro-batch."""

    def __init__(self, blocks: dict[str, nn.Module], example: Batch) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)
        self.example = example

    def forward(self, x: Tensor) -> Tensor:
        return chain(self.blocks, x, self.example).x


def _local_stages(training: Training, *, chunks: int) -> list[PipelineStage]:
    """This rank's stages: every `size`-th of all stages."""
    size = training.size
    comm = training.comm
    num_ranks = comm.mesh.size
    num_stages = num_ranks * chunks
    blocks = training.plain_blocks()
    example = training.batch.rows(slice(0, _micro_size(training)))
    specs = size.config.block_specs(size.seq_len)
    all_stages = make_stages(specs, num_stages)
    local = []
    for index in range(comm.rank, num_stages, num_ranks):
        own_blocks = {}
        for name in all_stages[index].blocks:
            if name != "loss":
                own_blocks[name] = blocks[name]
        module = _StageModule(own_blocks, example)
        stage = PipelineStage(module, index, num_stages, torch.device("cpu"))
        local.append(stage)
    return local


def _pipelining_step(training: Training, *, chunks: int) -> Step:
    rank = training.comm.rank
    last_rank = training.comm.mesh.size - 1
    batch = training.batch
    num_targets = training.size.tokens
    stages = _local_stages(training, chunks=chunks)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        summed = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        return summed / num_targets

    if chunks == 1:
        schedule = Schedule1F1B(stages[0], NUM_MICRO_BATCHES, loss_of, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, NUM_MICRO_BATCHES, loss_of, scale_grads=False)
    params: list[Tensor] = []
    for stage in stages:
        params.extend(stage.submod.parameters())
    optimizer = torch_adamw(params)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            inputs = (batch.inputs,)
        else:
            inputs = ()
        target = batch.targets if rank == last_rank else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if losses:
            local_loss = torch.stack(losses).sum().detach()
        else:
            local_loss = torch.zeros(())
        total_loss = _clip_over_stages(params, local_loss)
        optimizer.step()
        return total_loss

    return step


def _clip_over_stages(params: list[Tensor], local_loss: Tensor) -> float:
    """Clip by the norm over all ranks, which hold different parameters; returns the sum of the ranks' losses."""
    gradients = [param.grad for param in params]
    norms = torch.stack(torch._foreach_norm(gradients))
    squared_norm = norms.square().sum()
    totals = torch.stack((squared_norm, local_loss))
    dist.all_reduce(totals)
    total_squared_norm, loss = totals
    norm = total_squared_norm.sqrt()
    scale = CLIP / (norm + 1e-6)
    torch._foreach_mul_(gradients, scale.clamp(max=1.0))
    return loss.item()
