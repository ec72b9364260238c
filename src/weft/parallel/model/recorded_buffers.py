"""Updates of buffers by what the micro-batches of all data ranks have recorded, in the order of the samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.dimension import sequence_axes
from weft.core.mesh import Axis
from weft.data.order import layout_of
from weft.errors import Fault, PlanError
from weft.models.common.buffer_updates import (
    GROUP,
    BufferRecords,
    Calls,
    apply_update,
    is_batch_norm,
    num_together,
    record_batch_norm,
    take_parts,
    updating_modules,
)
from weft.parallel.model.dropout_blocks import block_as_written
from weft.parallel.model.group_statistics import StatisticsGroup
from weft.parallel.model.parallelize import ParallelModel


def with_records(model: ParallelModel, *, fixed_order: bool = False) -> ParallelModel:
    """The model, whose training forwards record what buffers are updated by.

    Args:
        fixed_order: whether sums have the same bits whatever the number of data ranks.
    """
    modules: dict[str, nn.Module] = {}
    blocks = {name: block_as_written(block) for name, block in model.blocks.items()}
    for name, block in blocks.items():
        record_batch_norm(block)
        modules.update(updating_modules(block, name))
    num_ranks = model.plan.statistics_ranks
    group = StatisticsGroup.of(model.comm, num_ranks, fixed_order=fixed_order)
    if group is None and num_ranks > 1:  # a search measures blocks without the other ranks
        assert model.comm.device.type == "meta", "data ranks hold the groups of a run"
        take_parts(blocks)
    elif group is not None:
        for module in filter(is_batch_norm, modules.values()):
            vars(module)[GROUP] = group
    return replace(model, buffer_records=BufferRecords(modules))


@dataclass(frozen=True)
class _Recorded:
    """What one module has recorded in each micro-batch of a rank."""

    name: str
    calls: tuple[Calls, ...]

    def tensors(self) -> Iterator[Tensor]:
        """All values, in a fixed order."""
        for calls in self.calls:
            for values in calls:
                yield from values

    def with_tensors(self, tensors: Iterator[Tensor]) -> _Recorded:
        """The same calls with the values of another rank."""
        calls = tuple(
            [tuple(next(tensors) for _ in values) for values in of_microbatch]
            for of_microbatch in self.calls
        )
        return _Recorded(self.name, calls)


def apply_updates(
    records: BufferRecords,
    comm: Comm,
    *,
    microbatches: int,
    num_runs: int,
    num_played: int | None = None,
) -> None:
    """Update buffers by what all data ranks have recorded in a step, in the order of the samples; see
    Note [Buffer updates]. Every rank must call it.

    Args:
        microbatches: of a step, on every data rank.
        num_played: those that ran, where a few stand for all; None: all.
        num_runs: groups of data ranks that take consecutive micro-batches, as of the data loader.

    Raises:
        PlanError: a module has recorded other values in one micro-batch than in another.
    """
    played = [number % (num_played or microbatches) for number in range(microbatches)]
    recorded = _in_fixed_order(records.take(), played)
    if not recorded:
        return
    axes, degree = sequence_axes(), comm.degree(sequence_axes())
    of_ranks = _gathered(recorded, comm, axes) if degree > 1 else [recorded]
    numbers = np.arange(degree * microbatches)
    placed = {
        int(number): (rank, own)
        for rank in range(degree)
        for own, number in enumerate(
            layout_of(numbers, index=rank, degree=degree, micro_size=1, outer=num_runs)[:, 0]
        )
    }
    order = [placed[number] for number in sorted(placed)]
    for place, module_records in enumerate(recorded):
        module = records.modules[module_records.name]
        if comm.device.type == "meta" and not is_batch_norm(module):
            continue  # its method may read numbers
        # One after the other, in the order of the samples: a running mean depends on it.
        for rank, own in order[:: num_together(module)]:
            for values in of_ranks[rank][place].calls[own]:
                apply_update(module, values)


def _in_fixed_order(taken: dict[str, dict[int, Calls]], played: Sequence[int]) -> list[_Recorded]:
    """The records of each module, by micro-batch.

    Args:
        played: for each micro-batch the one that ran in its place.
    """
    found = []
    for name in sorted(taken):
        calls = tuple(taken[name].get(number, []) for number in played)
        shapes = [[[value.shape for value in values] for values in each] for each in calls]
        if shapes.count(shapes[0]) < len(shapes):
            what = "hands other values to update_buffers in one micro-batch than in another"
            fix = "in every training forward as many calls, with values of the same shapes"
            raise PlanError(Fault(name, what, fix=fix))
        found.append(_Recorded(name, calls))
    return found


def _gathered(recorded: list[_Recorded], comm: Comm, axes: Axis) -> list[list[_Recorded]]:
    """The records of every rank along `axes`; one message for each dtype."""
    alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for own in recorded:
        for tensor in own.tensors():
            alike[tensor.dtype].append(tensor)
    received: dict[torch.dtype, Tensor] = {}
    for dtype, tensors in alike.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received[dtype] = comm.all_gather(flat.unsqueeze(0), axes)
    found = []
    for rank in range(comm.degree(axes)):
        parts = {
            dtype: iter(received[dtype][rank].split([tensor.numel() for tensor in tensors]))
            for dtype, tensors in alike.items()
        }
        found.append(
            [
                own.with_tensors(
                    next(parts[tensor.dtype]).view(tensor.shape) for tensor in own.tensors()
                )
                for own in recorded
            ]
        )
    return found
