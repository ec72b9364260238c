"""Pipeline parallelism against torch.distributed.pipelining: the same stages, 8 micro-batches, 1F1B and interleaved."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.rivals.course import CLIP, Course, Step, torch_adamw
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from weft.layout.plan import make_stages
from weft.models.common.batch import Batch, chain

MESH = "pp2"
MICROBATCHES = 8


def one_f_one_b(course: Course) -> dict[str, Step]:
    """One stage a rank."""
    return {
        "pipelining.Schedule1F1B": _torchs(course, chunks=1),
        "pp2 1f1b, trainer": course.weft_step(micro=course.size.sequences // MICROBATCHES, schedule="1f1b"),
    }


def interleaved(course: Course) -> dict[str, Step]:
    """Two stages a rank."""
    micro = course.size.sequences // MICROBATCHES
    return {
        "pipelining.ScheduleInterleaved1F1B": _torchs(course, chunks=2),
        "pp2 interleaved, trainer": course.weft_step(micro=micro, schedule="interleaved", chunks=2),
    }


LINES = {"1f1b": one_f_one_b, "interleav": interleaved}


class _Part(nn.Module):
    """The blocks of one stage, for micro-batches of always the same shape."""

    def __init__(self, blocks: dict[str, nn.Module], like: Batch) -> None:
        super().__init__()
        self.blocks, self.like = nn.ModuleDict(blocks), like

    def forward(self, x: Tensor) -> Tensor:
        return chain(self.blocks, x, self.like).x


def _torchs(course: Course, *, chunks: int) -> Step:
    size, rank, ranks = course.size, course.comm.rank, course.comm.mesh.size
    whole, blocks = course.batch, course.plain_blocks()
    like, num_targets = whole.rows(slice(0, size.sequences // MICROBATCHES)), size.tokens
    stages = make_stages(size.config.block_specs(size.seq_len), ranks * chunks)
    parts = [
        PipelineStage(
            _Part({name: blocks[name] for name in stage.blocks if name != "loss"}, like),
            index,
            len(stages),
            torch.device("cpu"),
        )
        for index, stage in enumerate(stages)
        if index % ranks == rank
    ]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / num_targets

    schedule = (
        Schedule1F1B(parts[0], MICROBATCHES, loss_of, scale_grads=False)
        if chunks == 1
        else ScheduleInterleaved1F1B(parts, MICROBATCHES, loss_of, scale_grads=False)
    )
    params = [param for part in parts for param in part.submod.parameters()]
    optimizer = torch_adamw(params)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (whole.inputs,) if rank == 0 else ()
        target = whole.targets if rank == ranks - 1 else None
        schedule.step(*given, target=target, losses=losses, return_outputs=False)
        total = clip_over_ranks(params, torch.stack(losses).sum().detach() if losses else torch.zeros(()))
        optimizer.step()
        return total

    return step


def clip_over_ranks(params: list[Tensor], loss: Tensor) -> float:
    """Clip by the norm over all ranks, each of which holds other parameters; the sum of the ranks' losses."""
    gradients = [param.grad for param in params]
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
    both = torch.stack((squares, loss))
    dist.all_reduce(both)
    torch._foreach_mul_(gradients, (CLIP / (both[0].sqrt() + 1e-6)).clamp(max=1.0))
    return both[1].item()
