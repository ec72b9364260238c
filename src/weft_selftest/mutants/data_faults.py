"""Mutants of data: samples of a rank, order, targets, documents, evaluation, recomputed forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.models.common.batch import IGNORE, Batch
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.recompute.blocks import RecomputedBlock
from weft.train.data_loader import DataLoader
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import named_argument
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout

DP = MutantLayout("dp2")
PACKED = MutantLayout("dp2", documents=True)
BATCHES = "weft.train.data_loader:DataLoader.batches"
MICRO_BATCHES = "weft.train.data_loader:DataLoader.micro_batches"
WHOLE_BATCH = "weft.train.data_loader:whole_batch"
ANY_AXIS = ("",)
STEP = ("",)


def filled_up(batches_of: Callable[..., Any], num_samples: int, size: int, *, most: int) -> Any:
    """A last batch that is not full is filled up with its own samples again."""
    for chosen in batches_of(num_samples, size, most=most):
        yield np.resize(chosen[chosen >= 0], size)


def larger_value(fill: Callable[..., None], slot: Any, value: Tensor) -> None:
    """A hundredth larger."""
    fill(slot, value * 1.01)


def first_step(batches: Callable[..., list[Batch]], loader: DataLoader, step: int) -> list[Batch]:
    """Every step reads the data of the first."""
    return batches(loader, 0)


def next_step(batches: Callable[..., list[Batch]], loader: DataLoader, step: int) -> list[Batch]:
    """Every step reads the data of the step after it."""
    return batches(loader, step + 1)


def other_order(batches: Callable[..., list[Batch]], loader: DataLoader, step: int) -> list[Batch]:
    """Data ranks shuffle by different seeds."""
    return batches(replace(loader, seed=loader.seed + loader.index), step)


def repeated_microbatch(
    micro_batches: Callable[..., list[Batch]], loader: DataLoader, chosen: Any
) -> list[Batch]:
    """The last micro-batch is the first one again."""
    found = micro_batches(loader, chosen)
    return [*found[:-1], found[0]]


def shifted_targets(whole: Callable[..., Batch], *args: Any, **named: Any) -> Batch:
    """Targets are shifted once more."""
    batch = whole(*args, **named)
    return replace(batch, targets=batch.targets.roll(-1, dims=1))


def targets_without_mask(whole: Callable[..., Batch], *args: Any, **named: Any) -> Batch:
    """Masked targets count."""
    batch = whole(*args, **named)
    return replace(batch, targets=batch.targets.clamp(min=0))


def mask_off_by_one(whole: Callable[..., Batch], *args: Any, **named: Any) -> Batch:
    """The mask of targets is one token too early."""
    batch = whole(*args, **named)
    is_masked = batch.targets == IGNORE
    unmasked = batch.targets.clamp(min=0)
    is_followed_by_masked = is_masked.roll(-1, dims=1)
    targets = unmasked.masked_fill(is_followed_by_masked, IGNORE)
    return replace(batch, targets=targets)


def one_document(whole: Callable[..., Batch], *args: Any, **named: Any) -> Batch:
    """Attention crosses the borders of documents."""
    return replace(whole(*args, **named), documents=None)


def continued_positions(whole: Callable[..., Batch], *args: Any, **named: Any) -> Batch:
    """Positions do not restart with a document."""
    batch = whole(*args, **named)
    length = batch.inputs.shape[1]
    columns = torch.arange(length).expand_as(batch.positions)
    return replace(batch, positions=columns.clone())


class OtherInputWhenRecomputed:
    """A recomputed forward reads positions from 0 on."""

    def __call__(
        self, forward: Callable[..., Any], block: RecomputedBlock, x: Tensor, batch: Batch
    ) -> Any:
        inner = block.block
        calls: list[bool] = []

        def call(x: Tensor, batch: Batch) -> Any:
            if calls:
                batch = replace(batch, positions=torch.zeros_like(batch.positions))
            calls.append(True)
            return inner(x, batch)

        block_copy = RecomputedBlock(Calls(call), block.mode)
        return forward(block_copy, x, batch)


class Calls(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, batch: Batch) -> Any:
        return self.call(x, batch)


MUTANTS = (
    Mutant(
        "every_data_rank_trains_on_the_same_samples",
        "half of the data is never seen",
        MutantLayout("dp2 tp2"),
        (FunctionFault("weft.train.data_loader:layout_of", named_argument("index", 0)),),
        axes=(DP_AXIS,),
        blocks=STEP,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "data_ranks_shuffle_by_different_seeds",
        "some samples are seen twice and others never",
        DP,
        (FunctionFault(BATCHES, other_order),),
        axes=(DP_AXIS,),
        blocks=STEP,
        reference=references.MEGATRON_RANDOM_STATE,
    ),
    Mutant(
        "every_step_reads_the_data_of_the_first",
        "the position in the data does not advance",
        DP,
        (FunctionFault(BATCHES, first_step),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "every_step_reads_the_data_of_the_next",
        "steps are off by one",
        DP,
        (FunctionFault(BATCHES, next_step),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "the_last_micro_batch_is_the_first_one_again",
        "some samples are left out",
        DP,
        (FunctionFault(MICRO_BATCHES, repeated_microbatch),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "targets_are_shifted_twice",
        "the model predicts the token after the next one",
        DP,
        (FunctionFault(WHOLE_BATCH, shifted_targets),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "targets_at_the_end_of_documents_count",
        "their mask is lost",
        PACKED,
        (FunctionFault(WHOLE_BATCH, targets_without_mask),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "the_mask_of_targets_is_off_by_one",
        "a token before the end of a document does not count",
        PACKED,
        (FunctionFault(WHOLE_BATCH, mask_off_by_one),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "attention_crosses_documents",
        "documents of a packed sequence are one",
        PACKED,
        (FunctionFault(WHOLE_BATCH, one_document),),
        axes=ANY_AXIS,
        blocks=("", "layer0"),
    ),
    Mutant(
        "positions_do_not_restart_in_documents",
        "rotary angles are those of the sequence",
        PACKED,
        (FunctionFault(WHOLE_BATCH, continued_positions),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "a_recomputed_forward_reads_other_positions",
        "the backward is of another function than the forward",
        MutantLayout("dp2", options="--parallel.recompute full"),
        (
            FunctionFault(
                "weft.parallel.recompute.blocks:RecomputedBlock.forward", OtherInputWhenRecomputed()
            ),
        ),
        axes=ANY_AXIS,
        blocks=("layer2",),
        reference=references.MEGATRON_RANDOM_STATE,
    ),
    Mutant(
        "selective_recomputation_fills_slots_with_other_values",
        "norms and activations are saved right and recomputed wrong",
        MutantLayout("dp2", options="--parallel.recompute selective"),
        (
            FunctionFault(
                "weft.parallel.recompute.recomputed_tensor:SavedTensorSlot.fill", larger_value
            ),
        ),
        axes=ANY_AXIS,
        blocks=("head", "layer2"),
    ),
    Mutant(
        "evaluation_counts_samples_of_the_last_batch_twice",
        "what is missing in the last batch is filled up with samples",
        MutantLayout("dp2", options="--eval.batches 0", evaluates=True),
        (FunctionFault("weft.train.evaluate:batches_of", filled_up),),
        axes=ANY_AXIS,
        blocks=STEP,
    ),
    Mutant(
        "evaluation_counts_the_first_rank_alone",
        "the loss of the other ranks' samples is lost",
        MutantLayout("dp2", evaluates=True),
        (CollectiveFault("Evaluation.__call__", "repeat"),),
        axes=(DP_AXIS,),
        blocks=STEP,
    ),
)
