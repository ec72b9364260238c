"""Mutants of buffers that training updates: records of other ranks, micro-batches and passes, statistics, what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.data.order import Ints
from weft.models.common.buffer_updates import BufferRecords, RecordingBatchNorm
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.model.group_statistics import StatisticsGroup
from weft_selftest.mutants import normed_model
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

FAMILY = normed_model.__name__
BUFFERS = "weft.parallel.model.recorded_buffers"
RECORDS = "weft.models.common.buffer_updates:BufferRecords"
NORM = "weft.models.common.buffer_updates:RecordingBatchNorm"
LAYERS = ("layer*",)


def of_this_rank(gathered: Callable[..., Any], recorded: Any, comm: Any, axes: Any) -> list[Any]:
    """Every data rank's records are this rank's."""
    return [recorded] * comm.degree(axes)


def rank_after_rank(
    order: Callable[..., Ints],
    numbers: Ints,
    *,
    index: int,
    degree: int,
    micro_size: int,
    outer: int,
) -> Ints:
    """All micro-batches of a data rank come before those of the next one."""
    return order(numbers, index=index, degree=degree, micro_size=micro_size, outer=degree)


def without_bias_of_variance(
    update: Callable[..., None], norm: nn.Module, statistics: Tensor
) -> None:
    """The running variance is of the biased one, of 16 positions."""
    mean, variance = statistics
    update(norm, torch.stack((mean, variance * (15 / 16))))


def in_training_mode(evaluating: Callable[..., Any], blocks: Any) -> Any:
    """An evaluation normalises by its own micro-batches."""
    return nullcontext()


def into_copies(states: Callable[..., Iterator[Any]], model: Any) -> Iterator[Any]:
    """A restore writes into copies of the running values."""
    for state in states(model):
        copies = {section: tensor.clone() for section, tensor in state.tensors.items()}
        yield replace(state, tensors=copies)


def at_once(
    add: Callable[..., None], records: BufferRecords, module: Any, values: tuple[Tensor, ...]
) -> None:
    """Each rank updates its buffers in its own forwards, as a plain loop does."""
    if records.microbatch is not None and module.training:
        module.update_buffers(*values)


@dataclass
class RecordedAgain:
    """A forward that is recomputed records its statistics, too."""

    last: dict[tuple[int, int], int] = field(default_factory=dict)

    def __call__(
        self,
        add: Callable[..., None],
        records: BufferRecords,
        module: nn.Module,
        values: tuple[Tensor, ...],
    ) -> None:
        key = (id(records), get_ident())
        is_recomputed = records.microbatch is None and module.training and key in self.last
        if records.microbatch is not None:
            self.last[key] = records.microbatch
        if not is_recomputed:
            add(records, module, values)
            return
        with records.of_microbatch(self.last[key]):
            add(records, module, values)


@dataclass
class StatisticsOfLastMicroBatch:
    """A micro-batch is normalised by the statistics of the one before it."""

    last: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(
        self, forward: Callable[..., Tensor], norm: RecordingBatchNorm, x: Tensor
    ) -> Tensor:
        if not norm.training or x.is_meta:
            return forward(norm, x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        own = (x.detach().mean(dims), x.detach().var(dims, correction=0))
        mean, variance = self.last.get(id(norm), own)
        self.last[id(norm)] = own
        forward(norm, x)  # records
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, eps=norm.eps)


def of_own_samples(gather: Callable[..., Tensor], group: StatisticsGroup, row: Tensor) -> Tensor:
    """A rank normalises by the statistics of its own micro-batch."""
    return row.unsqueeze(0)


def of_first_group(gather: Callable[..., Tensor], group: StatisticsGroup, row: Tensor) -> Tensor:
    """All groups normalise by the statistics of the first one."""
    return group.comm.all_gather(row.unsqueeze(0), group.axis)[: group.size]


def own_sum(total: Callable[..., Tensor], group: StatisticsGroup, row: Tensor) -> Tensor:
    """The gradients of statistics are those of a rank's own loss."""
    return row


def of_each_rank(num_together: Callable[..., int], norm: nn.Module) -> int:
    """Every rank of a group updates the running values."""
    return 1


DP = MutantLayout("dp2", family=FAMILY)
GROUP = "weft.parallel.model.group_statistics:StatisticsGroup"
STATISTICS = "--batch.global_size 8 --batch.micro_size 1 --batch.statistics_size 2"
DP_STATISTICS = MutantLayout("dp2", family=FAMILY, options=STATISTICS)

MUTANTS = (
    Mutant(
        "running_values_are_of_one_data_rank",
        "each rank has the statistics of its own micro-batches",
        DP,
        (FunctionFault(f"{BUFFERS}:_gathered", of_this_rank),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "running_values_are_updated_in_each_forward",
        "as by torch's BatchNorm in a rank of its own",
        DP,
        (FunctionFault(f"{RECORDS}.add", at_once),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "running_values_are_updated_rank_after_rank",
        "the order of the samples is another one",
        DP,
        (FunctionFault(f"{BUFFERS}:layout_of", rank_after_rank),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "recomputed_forwards_record_statistics_again",
        "each micro-batch counts twice",
        MutantLayout("dp2", family=FAMILY, options="--parallel.recompute full"),
        (FunctionFault(f"{RECORDS}.add", RecordedAgain()),),
        axes=("",),
        blocks=LAYERS,
    ),
    Mutant(
        "a_micro_batch_is_normalised_by_the_one_before",
        "statistics of another micro-batch of the rank",
        MutantLayout("pp2", family=FAMILY, options="--batch.global_size 8"),
        (FunctionFault(f"{NORM}.forward", StatisticsOfLastMicroBatch()),),
        axes=("",),
        blocks=LAYERS,
    ),
    Mutant(
        "running_variances_are_biased",
        "n in place of n - 1",
        DP,
        (FunctionFault(f"{NORM}.update_buffers", without_bias_of_variance),),
        axes=("",),
        blocks=LAYERS,
    ),
    Mutant(
        "an_evaluation_normalises_by_its_own_batches",
        "modules stay in training mode",
        MutantLayout("dp2", family=FAMILY, evaluates=True),
        (FunctionFault("weft.parallel.pipeline.forward:evaluating", in_training_mode),),
        axes=("",),
        blocks=("",),
    ),
    Mutant(
        "synchronised_statistics_are_of_one_data_rank",
        "as by BatchNorm of each rank's micro-batch",
        DP_STATISTICS,
        (FunctionFault(f"{GROUP}.gather", of_own_samples),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "synchronised_statistics_are_of_the_first_group",
        "two groups of two data ranks normalise by those of one",
        MutantLayout("dp4", family=FAMILY, options=STATISTICS),
        (FunctionFault(f"{GROUP}.gather", of_first_group),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "gradients_of_synchronised_statistics_are_of_one_data_rank",
        "the loss of a rank depends on the samples of the others: the backward is not reduced",
        DP_STATISTICS,
        (FunctionFault(f"{GROUP}.sum", own_sum),),
        axes=(DP_AXIS,),
        blocks=(*LAYERS, "embed"),
    ),
    Mutant(
        "running_values_are_updated_by_every_rank_of_a_group",
        "the statistics of a group count once for each of its ranks",
        DP_STATISTICS,
        (FunctionFault(f"{BUFFERS}:num_together", of_each_rank),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "running_values_are_stored_and_not_restored",
        "a resumed run starts with those of a new one",
        DP,
        (FunctionFault("weft.checkpoint.state:_buffer_states", into_copies),),
        axes=("",),
        blocks=LAYERS,
    ),
)
