"""Gradient norm, root mean square of parameters and outputs, and expert load of each block, over all ranks, every n steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.dimension import local_update_axes, pipeline_axis
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.zero import grad_norm
from weft.train.expert_load import imbalance
from weft.train.step import ComputedStep, TrainStep
from weft.train.step_stats import StepTotals

COLUMNS = 6
GRADIENTS, PARAMETERS, ENTRIES, LOAD, OUTPUTS, OUTPUT_ENTRIES = range(COLUMNS)
"""Columns of the sums of a block: squares of the gradients, squares of the parameters, entries; largest over mean
load of an expert, which one rank adds; squares and entries of the outputs.
"""
NOT_HANDED_ON = ("head", "loss")
"""Blocks whose outputs are logits or losses."""


@dataclass
class BlockStats:
    """Measures the blocks of some steps when their gradients are reduced; every rank makes the same
    calls.

    Each logical parameter that is trained counts once, whatever ranks hold copies or shards of it,
    and a tied one in its owner's block. Parameters are those before the update, gradients those
    before clipping. Of replicas that train apart, norm and root mean square are the root of the mean
    square over the replicas.

    The root mean square of outputs is over what every rank hands on: where ranks hold copies of an
    entry, or compute it again for the backward, they do so with all entries, which changes no mean.

    Args:
        every: steps between two measurements.
    """

    step: TrainStep
    every: int
    _sums: Tensor | None = field(default=None, repr=False)
    _scale: float = 1.0
    _outputs: Tensor | None = field(default=None, repr=False)

    def is_due(self, number: int) -> bool:
        """Whether step `number` (the first is 1) is measured."""
        return number % self.every == 0

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of the whole model, in order."""
        return tuple(name for stage in self.step.model.plan.stages for name in stage.blocks)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the outputs of the blocks of this rank are measured."""
        model = self.step.model
        shape = (len(self.blocks), 2)
        self._outputs = torch.zeros(shape, dtype=torch.float64, device=model.comm.device)
        hooks = [
            block.register_forward_hook(partial(self._add_outputs, self.blocks.index(name)))
            for name, block in model.blocks.items()
            if name not in NOT_HANDED_ON
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add_outputs(self, row: int, block: nn.Module, args: object, output: object) -> None:
        if self._outputs is None:
            return
        for tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.numel():
                self._outputs[row, 0] += grad_norm.squares_of([tensor.detach()])[0]
                self._outputs[row, 1] += tensor.numel()

    def measure(self, computed: ComputedStep, totals: StepTotals) -> None:
        """Sum over all ranks; called when the gradients are reduced."""
        comm = self.step.model.comm
        table = self._local_sums()
        if self._outputs is not None:
            table[:, OUTPUTS : OUTPUT_ENTRIES + 1] = self._outputs
            self._outputs = None
        if all(comm.index(axis) == 0 for axis, _ in comm.mesh.axes if axis != pipeline_axis()):
            for name, load in computed.loads.items():
                table[self.blocks.index(name), LOAD] = imbalance({name: load}, table.device)
        sums = comm.sum_world(table.flatten())
        self._sums = sums.view(len(self.blocks), -1)
        self._scale = computed.scale

    def take_event(self, number: int) -> Iterator[dict[str, Any]]:
        """The `blocks` event of a step that was measured; blocks that train nothing have outputs alone."""
        sums, self._sums = self._sums, None
        if sums is None or not self.is_due(number):  # of a step that was rolled back
            return
        table = dict(zip(self.blocks, sums.tolist(), strict=True))
        yield {"event": "blocks", "step": number, **self._fields(table)}

    def _fields(self, table: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
        num_replicas = self.step.model.comm.degree(local_update_axes())
        norms: dict[str, float] = {}
        sizes: dict[str, float] = {}
        outputs: dict[str, float] = {}
        loads = {name: row[LOAD] for name, row in table.items() if row[LOAD]}
        for name, row in table.items():
            if row[ENTRIES]:
                norms[name] = (row[GRADIENTS] / num_replicas) ** 0.5 / self._scale
                sizes[name] = (row[PARAMETERS] / row[ENTRIES]) ** 0.5
            if row[OUTPUT_ENTRIES]:
                outputs[name] = (row[OUTPUTS] / row[OUTPUT_ENTRIES]) ** 0.5
        fields = {"grad_norm": norms, "param_rms": sizes, "output_rms": outputs}
        return {**fields, "expert_load": loads} if loads else fields

    def _local_sums(self) -> Tensor:
        """This rank's part of the sums, [blocks, columns], float64: 0 for what an earlier rank counts, and
        for the load and the outputs.
        """
        model, grads = self.step.model, self.step.grads
        table = torch.zeros(
            len(self.blocks), COLUMNS, dtype=torch.float64, device=model.comm.device
        )
        counted = [
            name
            for name in grads.sharded_params
            if grad_norm.is_first_holder(model, name, sharded_over=grads.shard_axes[name])
        ]
        if not counted:
            return table
        params = [grads.sharded_params[name].detach() for name in counted]
        places = [self._place(name) for name in counted]
        rows = torch.tensor(places, device=table.device)
        entries = torch.tensor([float(param.numel()) for param in params], device=table.device)
        columns = {
            GRADIENTS: grad_norm.squares_of(
                [grad_norm.gradient_of(grads, name) for name in counted]
            ),
            PARAMETERS: grad_norm.squares_of(params),
            ENTRIES: entries.double(),
        }
        for column, values in columns.items():
            table[:, column].index_add_(0, rows, values)
        return table

    def _place(self, parameter: str) -> int:
        """Number of the block that a parameter is of."""
        block, _, _ = parameter.partition(".")
        return self.blocks.index(block)
