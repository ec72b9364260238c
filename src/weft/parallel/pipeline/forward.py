"""Owns playing forwards alone: the same stages, ranks and messages as in training, and nothing is kept for a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.core.axes import span_sizes
from weft.models.common.batch import Batch, chain
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.player import ActionCallback, Play, Player
from weft.schedule.actions import Act, Table


def run_stages(
    model: ParallelModel,
    x: Tensor,
    *,
    play: Callable[[int, Tensor], Tensor],
    shape_of: Callable[[int], tuple[int, ...]],
) -> Tensor:
    """`x` through all stages, one after the other; every rank of the mesh takes part.

    Args:
        play: (stage, what comes in) -> what it hands on; asked for the stages that live here.
        shape_of: stage -> shape of what it hands on; nothing is sent where that has no entries.

    Returns: what the last stage yields, on its ranks; elsewhere what this rank handed on.
    """
    comm, home, here = model.comm, model.plan.table.stage_to_rank, model.comm.index("pp")
    for stage in (stage for stage, rank in enumerate(home) if rank == here):
        if stage and home[stage - 1] != here:
            x = torch.empty(shape_of(stage - 1), dtype=getattr(torch, model.plan.compute), device=comm.device)
            x = comm.recv(x, "pp", source=home[stage - 1]) if x.numel() else x
        x = play(stage, x)
        if stage + 1 < len(home) and home[stage + 1] != here and x.numel():
            comm.send(x.contiguous(), "pp", to=home[stage + 1])
    return x


def gather_vocabulary(logits: Tensor, model: ParallelModel, *, vocab: int) -> Tensor:
    """logits[..., vocab] of this rank's logits[..., its part of the vocabulary]; all ranks along tp get them."""
    comm = model.comm
    if "vocab" not in model.plan.sharding_rule:
        return logits
    return comm.all_gather(logits, "tp", dim=-1, sizes=span_sizes(vocab, comm.degree("tp")))


def forward_table(table: Table) -> Table:
    """The forwards of a table, every row in its order: whatever the schedule, they need nothing else."""
    return Table(
        tuple(tuple(act for act in row if act.kind == "F") for row in table.rows),
        table.stage_to_rank,
        table.microbatches,
    )


class ForwardPlayer(Player):
    """Plays the forwards of this rank's row."""

    def __init__(self, model: ParallelModel, *, on_action: ActionCallback | None = None) -> None:
        super().__init__(
            model, before_last_backward=lambda stage: None, on_action=on_action, table=forward_table(model.plan.table)
        )

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> Tensor:
        """Sum over targets of the last block's loss, float64 scalar; 0 on ranks that do not hold that block.

        Extra losses of other blocks, which only guide the training, are left out.
        """
        return self.play(batches, torch.ones(())).loss

    def _forward(self, play: Play, act: Act) -> None:
        batch, source = play.batches[act.mb], self.table.source(act)
        x = batch.inputs if source is None else self._take(play, source)
        out = chain(self.model.stages[act.stage], x, batch)
        if act.stage == self.table.num_stages - 1:
            play.loss += out.x.double()
        else:
            play.made[act] = out.x
