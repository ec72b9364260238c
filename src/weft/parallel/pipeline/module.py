"""Owns `PipelineParallel`: the player around any sequence of modules, in a plain script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import data_axes, span
from weft.layout.plan import Plan, Stage
from weft.models.common.batch import Batch
from weft.parallel.data_parallel.buckets import GradientBuckets
from weft.parallel.model.parallelize import ParallelModel, parallelize
from weft.parallel.pipeline.player import Player
from weft.schedule.catalog import find

LossOf = Callable[[Tensor, Tensor], Tensor]


class PipelineParallel(nn.Module):
    """Any chain of modules over the pipeline axis (and, if the mesh has one, the data axis).

        pipe = weft.PipelineParallel(blocks, comm, loss=F.mse_loss, example=x[:4], microbatches=8)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        loss = pipe.step(x, y)        # forwards and backwards of all micro-batches; gradients are in place
        optimizer.step()

    Every rank passes the whole chain and keeps its own stages; a chain on the meta device costs nothing.

    Args:
        blocks: modules in order, each takes what the one before hands on (one tensor).
        comm: this rank's way to the others; axes "pp" and the data axes are used.
        loss: (output of the last block, targets) -> scalar mean over the micro-batch.
        example: input of one micro-batch, for its shape and dtype only.
        microbatches: a step's input is cut into so many, along dim 0.
        schedule, chunks: as `weft schedule` draws them; by default as many chunks as the schedule is made for.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        comm: Comm,
        *,
        loss: LossOf,
        example: Tensor,
        microbatches: int,
        schedule: str = "1f1b",
        chunks: int | None = None,
    ) -> None:
        super().__init__()
        chunks = find(schedule).default_chunks if chunks is None else chunks
        dtype = str(example.dtype).removeprefix("torch.")
        plan = Plan(
            mesh=comm.mesh,
            family="custom",
            architecture="{}",
            stages=_stages(blocks, comm.degree("pp") * chunks, example),
            schedule=schedule,
            chunks=chunks,
            microbatches=microbatches,
            params=dtype,
            compute=dtype,
            reduce=dtype,
        )
        chain: dict[str, nn.Module] = {str(index): _Plain(block) for index, block in enumerate(blocks)}
        self.model: ParallelModel = parallelize({**chain, "loss": _LossBlock(loss)}, plan, comm)
        self.stages = nn.ModuleList(self.model.stages.values())
        self.comm, self.microbatches = comm, microbatches
        self._buckets = GradientBuckets(
            self.model.params,
            comm=comm,
            reduce={name: piece.reduce_axes for name, piece in self.model.shards.items()},
            stage_of=self.model.stage_of,
        )
        self._player = Player(self.model, before_last_backward=self._buckets.set_requires_gradient_sync)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss over `inputs` (of all data ranks); returns that loss, on every rank.

        inputs[N, ...] and targets[N, ...] are this data rank's; N must divide by `microbatches`.
        """
        batches = [
            Batch(x, y, torch.zeros(0, dtype=torch.int64))
            for x, y in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        ]
        axes = data_axes(self.comm.mesh)
        seed = torch.tensor(1.0 / (self.microbatches * self.comm.degree(axes)), dtype=torch.float64)
        self._buckets.zero_grad()
        loss = self._player.play(batches, seed).loss * seed
        self._buckets.finish()
        return self.comm.all_reduce(loss, ("pp", *axes))


class _Plain(nn.Module):
    """A module of the user's, called as a block."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.module(x)
        return out


class _LossBlock(nn.Module):
    def __init__(self, loss: LossOf) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.loss(x, batch.targets)


def _stages(blocks: Sequence[nn.Module], num_stages: int, example: Tensor) -> tuple[Stage, ...]:
    """Stages of about equally many blocks, with the shapes that the blocks themselves yield on the meta device."""
    x = torch.empty_like(example, device="meta")
    shapes: list[tuple[int, ...]] = []
    for block in blocks:
        x = copy.deepcopy(block).to("meta")(x)
        shapes.append(tuple(x.shape))
    stages = []
    for lo, hi in (span(len(blocks), num_stages, index) for index in range(num_stages)):
        is_last = hi == len(blocks)
        names = (*map(str, range(lo, hi)), *(("loss",) if is_last else ()))
        stages.append(Stage(blocks=names, out=() if is_last else shapes[hi - 1], flops=float(hi - lo)))
    return tuple(stages)
