"""Mutants of context parallelism: columns, masks, exchanges of keys and values, targets made after the split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.models.common.batch import Batch, with_later_targets
from weft.parallel.cp import AXIS as CP_AXIS
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import nothing, returns
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout

RING = MutantLayout("cp2")
ALL_GATHER = MutantLayout("cp2", options="--parallel.context allgather")
ULYSSES = MutantLayout("cp2", options="--parallel.context ulysses")
AXIS = (CP_AXIS,)
COLUMNS = "weft.models.common.batch:Batch.columns"
FIRST_LAYER = ("layer0",)


def positions_from_zero(
    columns: Callable[..., Batch], batch: Batch, *, index: int, degree: int
) -> Batch:
    """Each rank counts the positions of its own columns."""
    own = columns(batch, index=index, degree=degree)
    if degree == 1:
        return own
    local = torch.arange(own.inputs.shape[1]).expand_as(own.positions)
    return replace(own, positions=local)


def later_targets_of_columns(
    columns: Callable[..., Batch], batch: Batch, *, index: int, degree: int
) -> Batch:
    """The fields for multi-token prediction are made of a rank's own columns."""
    own = columns(batch, index=index, degree=degree)
    if own.later_targets is None:
        return own
    return with_later_targets(own)


def targets_of_columns(
    columns: Callable[..., Batch], batch: Batch, *, index: int, degree: int
) -> Batch:
    """Targets are the inputs of the rank shifted by one: wrong at the ends of its chunks."""
    own = columns(batch, index=index, degree=degree)
    if degree == 1:
        return own
    shifted = torch.cat((own.inputs[:, 1:], own.targets[:, -1:]), dim=1)
    return replace(own, targets=shifted)


def other_ranks_columns(
    columns: Callable[..., Batch], batch: Batch, *, index: int, degree: int
) -> Batch:
    """Every rank reads the columns of the first."""
    return columns(batch, index=0, degree=degree)


def consecutive_columns(zigzag: Callable[..., Any], length: int, parts: int, index: int) -> Any:
    """A rank holds consecutive columns, where attention expects two chunks."""
    size = length // parts
    return (range(index * size, (index + 1) * size),)


def full_triangles(masks: Callable[..., Any], blocks: Any, index: int, source: int) -> Any:
    """Tokens see later tokens of their own chunk."""
    found = masks(blocks, index, source)
    return tuple(
        replace(block, kind="full") if block.kind == "triangle" else block for block in found
    )


def wider_window(visible: Callable[..., Any], mask: Any, queries: Tensor, keys: Tensor) -> Any:
    """A token sees one key more."""
    return visible(replace(mask, window=mask.window + 1), queries, keys)


def plain_mean(
    add: Callable[..., None], merged: Any, queries: slice, out: Tensor, lse: Tensor
) -> None:
    """Blocks are averaged without their weights."""
    had_results = not merged.is_empty
    before = merged.out[:, :, queries].clone() if had_results else None
    add(merged, queries, out, lse)
    if before is not None:
        merged.out[:, :, queries] = (before + out.to(merged.dtype)) / 2


def doubled_scale(scores: Callable[..., Any], attention: Any, block: Any, source: int, q: Any):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """The scores against keys of other ranks are scaled twice."""
    found = scores(attention, block, source, q)
    if source == attention.exchange.index:
        return found
    return replace(found, scale=found.scale * 2)


def own_gradients_alone(finish: Callable[..., Any], accumulator: Any) -> Any:
    """What other ranks found for the keys of this rank is dropped."""
    if accumulator.hop is not None:
        accumulator.hop.wait()
    return accumulator.own


def backward_ring(start: Callable[..., Any], *args: Any, step: int) -> Any:
    """Messages go to the neighbour on the other side."""
    return start(*args, step=-step)


MUTANTS = (
    Mutant(
        "every_cp_rank_counts_positions_from_zero",
        "rotary angles of the wrong columns",
        MutantLayout("cp2 tp2"),
        (FunctionFault(COLUMNS, positions_from_zero),),
        axes=AXIS,
        blocks=("",),
        reference=references.MEGATRON_CP_ROPE,
    ),
    Mutant(
        "targets_of_multi_token_prediction_are_made_after_the_split",
        "the target after the last one of a chunk is that of another chunk",
        MutantLayout("cp2", family="deepseek"),
        (FunctionFault(COLUMNS, later_targets_of_columns),),
        axes=AXIS,
        blocks=("",),
        reference=references.MEGATRON_MTP,
    ),
    Mutant(
        "targets_are_made_after_the_split",
        "the last token of a chunk is asked for the first one of another",
        RING,
        (FunctionFault(COLUMNS, targets_of_columns),),
        axes=AXIS,
        blocks=("",),
    ),
    Mutant(
        "every_cp_rank_reads_the_first_columns",
        "half of every sequence is never seen",
        RING,
        (FunctionFault(COLUMNS, other_ranks_columns),),
        axes=AXIS,
        blocks=("",),
    ),
    Mutant(
        "columns_are_consecutive_where_attention_expects_two_chunks",
        "tokens see later ones",
        RING,
        (FunctionFault("weft.models.common.batch:zigzag", consecutive_columns),),
        axes=AXIS,
        blocks=("",),
    ),
    Mutant(
        "attention_never_leaves_the_rank",
        "ring attention is silently not used",
        RING,
        (FunctionFault("weft.parallel.context.attend:apply", nothing),),
        axes=AXIS,
        blocks=FIRST_LAYER,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "gradients_of_keys_and_values_do_not_come_home",
        "each rank keeps what it found itself",
        MutantLayout("dp2 cp2"),
        (FunctionFault("weft.parallel.context.ring:RingAccumulator.finish", own_gradients_alone),),
        axes=AXIS,
        blocks=("layer2",),
    ),
    Mutant(
        "tokens_see_later_tokens_of_their_own_chunk",
        "the mask of a diagonal block is full",
        RING,
        (FunctionFault("weft.core.sequence:SequenceBlocks.block_masks", full_triangles),),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
    Mutant(
        "the_window_is_one_token_too_wide_across_ranks",
        "masks of partial blocks are off by one",
        MutantLayout("cp2", family="mistral"),
        (FunctionFault("weft.parallel.context.blocks:visible_keys", wider_window),),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
    Mutant(
        "blocks_of_scores_are_averaged_without_weights",
        "the log-sum-exp is ignored",
        RING,
        (FunctionFault("weft.parallel.context.blocks:_MergedBlocks.add", plain_mean),),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
    Mutant(
        "scores_against_other_ranks_are_scaled_twice",
        "a factor is applied to received keys",
        RING,
        (FunctionFault("weft.parallel.context.blocks:BlockAttention.scores", doubled_scale),),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
    Mutant(
        "the_ring_turns_the_other_way",
        "keys are taken for those of another rank",
        MutantLayout("cp4"),
        (FunctionFault("weft.parallel.context.ring:start_hop", backward_ring),),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
    Mutant(
        "keys_and_values_are_those_of_the_layer_before",
        "the buffer of the exchange is read too early",
        ALL_GATHER,
        (CollectiveFault("AllGatherExchange.receive", "stale", op="all_gather"),),
        axes=AXIS,
        blocks=("layer1",),
    ),
    Mutant(
        "gradients_of_keys_and_values_are_averaged",
        "the reduce-scatter divides by cp",
        ALL_GATHER,
        (CollectiveFault("ReduceScatterAccumulator.finish", "avg"),),
        axes=AXIS,
        blocks=("layer2",),
        reference=references.MEGATRON_CP_MASKS,
    ),
    Mutant(
        "ulysses_joins_columns_in_reverse_order",
        "the pieces of an all-to-all are swapped",
        ULYSSES,
        (CollectiveFault("UlyssesAttention._whole_sequences", "reverse", op="all_to_all"),),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
    Mutant(
        "documents_are_forgotten_across_ranks",
        "tokens see other documents",
        MutantLayout("cp2", documents=True),
        (
            FunctionFault(
                "weft.parallel.context.attend:BlockwiseAttention._whole_documents", returns(None)
            ),
        ),
        axes=AXIS,
        blocks=FIRST_LAYER,
    ),
)
