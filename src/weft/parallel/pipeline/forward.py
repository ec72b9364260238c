"""Forward passes alone, over the stages, ranks and messages of training: evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.axes import span_sizes
from weft.layout.plan import Plan
from weft.models.common.batch import Batch, chain
from weft.models.common.buffer_updates import evaluating
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.boundary import output_shapes, received_input, sent_output
from weft.parallel.pipeline.player import ActionCallback, Player, PlayResult, StepState
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.schedule.actions import Act, Table


def run_stages(model: ParallelModel, x: Any, *, play: Callable[[int, Any], Any], plan: Plan) -> Any:
    """`x` through all stages, one after the other; a collective over all ranks of the mesh.

    Args:
        play: (stage, its input) -> its output; called for the stages of this rank.
        plan: with the sizes of `x`; nothing is sent where an output has no entries. Where a stage
            hands on tensors whose length is not that of the sequence (tokens of memory before it),
            their shapes are sent first.

    Returns: the output of the last stage on its ranks; elsewhere that of this rank's last stage.
    """
    comm = model.comm
    stage_to_rank = model.plan.table.stage_to_rank
    here = comm.index(PP)
    last_stage = len(stage_to_rank) - 1
    dtype = getattr(torch, plan.compute)
    for stage, rank in enumerate(stage_to_rank):
        if rank != here:
            continue
        source = stage_to_rank[stage - 1] if stage > 0 else here
        if source != here:
            sizes = plan
            # Both ends ask the plan alone, so they agree on whether a message with the shapes comes first.
            if not plan.knows_sizes(stage - 1):
                sizes = plan.with_sizes(stage - 1, _received_shapes(comm, plan, stage - 1, source))
            arrived = torch.empty(sizes.boundary_shape(stage - 1), dtype=dtype, device=comm.device)
            # Both ends know the shape: an empty output is no message, and neither of them waits for one.
            if arrived.numel():
                arrived = comm.recv(arrived, PP, source=source)
            x = received_input(sizes, stage - 1, arrived)
        x = play(stage, x)
        to = stage_to_rank[stage + 1] if stage < last_stage else here
        if to != here:
            if not plan.knows_sizes(stage):
                numbers = [size for shape in output_shapes(plan, stage, x) for size in shape]
                comm.send(torch.tensor(numbers, device=comm.device), PP, to=to)
            sent = sent_output(plan, stage, x)
            if sent.numel():
                comm.send(sent.contiguous(), PP, to=to)
    return x


def _received_shapes(comm: Comm, plan: Plan, stage: int, source: int) -> list[tuple[int, ...]]:
    """Shapes of the tensors that `stage` hands on, which its rank sends before them."""
    numbers = [len(dims) for dims in plan.stages[stage].tensors]
    sizes = torch.empty(sum(numbers), dtype=torch.int64, device=comm.device)
    received: list[Tensor] = list(comm.recv(sizes, PP, source=source).split(numbers))
    return [tuple(shape.tolist()) for shape in received]


def gather_vocabulary(logits: Tensor, model: ParallelModel, *, vocab: int) -> Tensor:
    """Gather logits[..., vocab] from logits[..., vocab shard], on all ranks along tp."""
    comm = model.comm
    if "vocab" not in model.plan.sharding_rule:
        return logits
    sizes = span_sizes(vocab, comm.degree(TP))
    return comm.all_gather(logits, TP, dim=-1, sizes=sizes)


def forward_table(table: Table) -> Table:
    """The forwards of a table, every row in its order: in any schedule they need nothing else."""
    rows: list[list[Act]] = []
    for row in table.rows:
        forwards = [act for act in row if act.kind == "F"]
        rows.append(forwards)
    return Table.of_rows(rows, stage_to_rank=table.stage_to_rank, microbatches=table.microbatches)


class ForwardPlayer(Player):
    """Executes the forwards of this rank's row."""

    def __init__(self, model: ParallelModel, *, on_action: ActionCallback | None = None) -> None:
        super().__init__(
            model,
            before_last_backward=lambda stage: None,
            on_action=on_action,
            table=forward_table(model.plan.table),
        )

    def loss(self, batches: Sequence[Batch]) -> Tensor:
        """Sum over targets of the last block's loss, float64 scalar; 0 on ranks that do not hold
        that block.

        Extra losses of other blocks, which only guide the training, are left out.
        """
        return self._played(batches).loss

    def losses(self, batches: Sequence[Batch]) -> tuple[Tensor, ...]:
        """The same for each micro-batch; () on ranks that do not hold that block."""
        return self._played(batches).losses

    @torch.no_grad()
    def _played(self, batches: Sequence[Batch]) -> PlayResult:
        seed = torch.ones(())
        with evaluating(self.model.blocks):
            return self.play(batches, seed)

    def _forward(self, state: StepState, act: Act) -> None:
        batch = state.batches[act.mb]
        source = self.table.source(act)
        plan = self.model.plan
        x: Any = batch.inputs
        if source is not None:
            x = received_input(plan, source.stage, state.take_output(source))
        blocks = self.model.stages[act.stage]
        out = chain(blocks, x, batch)
        last_stage = self.table.num_stages - 1
        if act.stage == last_stage:
            state.losses.append(out.x.double())
            state.loss += state.losses[-1]
        else:
            state.outputs[act] = sent_output(plan, act.stage, out.x)
