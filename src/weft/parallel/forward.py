"""Owns playing forwards alone: the same stages, ranks and messages as in training, and nothing is kept for a backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.schedule import Act, Table
from weft.models.batch import Batch, chain
from weft.parallel.model import ParallelModel
from weft.parallel.pp import Player, Watch, _Play


def forwards_of(table: Table) -> Table:
    """The forwards of a table, every row in its order: whatever the schedule, they need nothing else."""
    return Table(
        tuple(tuple(act for act in row if act.kind == "F") for row in table.rows), table.home, table.microbatches
    )


class ForwardPlayer(Player):
    """Plays the forwards of this rank's row."""

    def __init__(self, model: ParallelModel, *, watch: Watch | None = None) -> None:
        super().__init__(
            model, before_last_backward=lambda stage: None, watch=watch, table=forwards_of(model.plan.table)
        )

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> Tensor:
        """Sum over targets of the last block's loss, float64 scalar; 0 on ranks that do not hold that block.

        Extra losses of other blocks, which only guide the training, are left out.
        """
        return self.play(batches, torch.ones(())).loss

    def _forward(self, play: _Play, act: Act) -> None:
        batch, source = play.batches[act.mb], self.table.source(act)
        x = batch.inputs if source is None else self._take(play, source)
        out = chain(self.model.stages[act.stage], x, batch)
        if act.stage == self.table.num_stages - 1:
            play.loss += out.x.double()
        else:
            play.made[act] = out.x
