"""KTO's z0, how far the model is from its reference: estimated by a forward of all micro-batches before a step is played.

See Note [Unpaired answers] in models/common/pair_losses.py. All micro-batches are needed before the
first backward, so this is a pass of its own over the stages of the schedule, without gradient and
without dropout, as in an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.core.dimension import local_update_axes, replicated_axes
from weft.models.common.batch import Batch
from weft.models.common.preference import preference_loss_of
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.parallel.zero.fixed_order import exact_sum


class KlEstimate:
    """Sets z0 of the loss on the ranks that have it.

    Attributes:
        mean: the last z0, of replicas that train apart the mean, the same on every rank; float64.

    Args:
        fixed_order: whether z0 has the same bits for every number of data ranks.
    """

    def __init__(self, model: ParallelModel, *, fixed_order: bool) -> None:
        self.comm = model.comm
        self.fixed_order = fixed_order
        self.loss = preference_loss_of(model.blocks)
        self.player = ForwardPlayer(model)
        self.mean: Tensor | None = None

    def update(self, batches: Sequence[Batch]) -> None:
        """Estimate z0 of these micro-batches, those of all ranks of a replica that trains by itself;
        every rank must call it.
        """
        loss = self.loss
        if loss is not None:
            loss.z0 = None
        sums = self.player.losses([replace(batch, draw_keys=None) for batch in batches])
        comm = self.comm
        counts_here = loss is not None and comm.index(replicated_axes()) == 0
        replicas = local_update_axes()
        table = torch.zeros((comm.degree(replicas), 2), dtype=torch.float64, device=comm.device)
        if counts_here:
            num_answers = torch.stack([batch.num_targets() for batch in batches]).sum()
            table[comm.index(replicas)] = torch.stack((torch.stack(sums).sum(), num_answers))
        totals, num_answers = comm.sum_world(table.flatten()).view_as(table).unbind(1)
        if self.fixed_order:
            totals = exact_sum(comm, sums if counts_here else ()).expand_as(totals)
        estimates = (totals / num_answers.clamp(min=1)).clamp(min=0)
        self.mean = estimates.mean()
        if loss is not None:
            loss.z0 = estimates[comm.index(replicas)]
