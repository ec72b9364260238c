"""Mutants of dropout and of noise: numbers of another step, sequence, layer, column, head or feature, in an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.entry_places import ShardingRank
from weft.data.order import Ints
from weft.models.common.batch import Batch
from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.recompute.blocks import RecomputedBlock
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.data_faults import Calls
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

DROPOUT = "--model.dropout 0.1"
NOISE = "--neftune 5"
KEYS = "weft.train.data_loader:draw_keys"
BATCHES = "weft.train.data_loader:DataLoader.batches"
MICRO_BATCHES = "weft.train.data_loader:DataLoader.micro_batches"
SHARDING_RANK = "weft.parallel.model.parallelize:sharding_rank"
DROPPING_BLOCK = "weft.parallel.model.parallelize:dropping_block"
SELECT_HEADS = "weft.models.common.dropout:AttentionDraws.select_heads"
FIRST = ("embed", "")


def _with_keys_of(batches: list[Batch], others: list[Batch]) -> list[Batch]:
    return [
        replace(own, draw_keys=other.draw_keys) for own, other in zip(batches, others, strict=True)
    ]


def of_first_step(batches: Callable[..., list[Batch]], loader: Any, step: int) -> list[Batch]:
    """Each step has the keys of the first."""
    return _with_keys_of(batches(loader, step), batches(loader, 0))


def of_next_step(batches: Callable[..., list[Batch]], loader: Any, step: int) -> list[Batch]:
    """Steps are counted from 1."""
    return _with_keys_of(batches(loader, step), batches(loader, step + 1))


def of_other_seed(keys: Callable[..., Ints], places: Ints, *, seed: int) -> Ints:
    """The seed is not that of the run."""
    return keys(places, seed=seed + 1)


def same_in_each_sequence(keys: Callable[..., Ints], places: Ints, *, seed: int) -> Ints:
    """All sequences of a step have the key of its first one."""
    return np.full_like(places, keys(places, seed=seed).flat[0])


def same_on_data_ranks(batches: Callable[..., list[Batch]], loader: Any, step: int) -> list[Batch]:
    """Each data rank has the keys of the first one."""
    return _with_keys_of(batches(loader, step), batches(replace(loader, index=0), step))


def in_evaluation(
    micro_batches: Callable[..., list[Batch]], loader: Any, chosen: Ints
) -> list[Batch]:
    """Batches of an evaluation have keys, too."""
    return [
        replace(batch, draw_keys=torch.arange(len(batch.inputs)))
        for batch in micro_batches(loader, chosen)
    ]


def first_context_rank(rank: Callable[..., ShardingRank], comm: Any) -> ShardingRank:
    """Columns are those of the first context-parallel rank."""
    return replace(rank(comm), context_index=0)


def first_tensor_rank(rank: Callable[..., ShardingRank], comm: Any) -> ShardingRank:
    """Heads and features, or columns, are those of the first tensor-parallel rank."""
    return replace(rank(comm), tensor_index=0)


def as_first_layer(
    dropping: Callable[..., nn.Module], name: str, block: nn.Module, shards: Any, rank: Any
) -> nn.Module:
    """Layers drop what the first one drops."""
    found = dropping(name, block, shards, rank)
    if found is not block and name.startswith("layer"):
        return dropping("layer0", block, shards, rank)
    return found


def own_columns(columns: Callable[..., Tensor], attention: Any, index: int, device: Any) -> Tensor:
    """Attention takes the columns of the first rank for its own."""
    is_own = attention.spec.draws is not None and index == attention.exchange.index
    return columns(attention, 0 if is_own else index, device)


def all_heads_first(select: Callable[..., Any], draws: Any, chosen: slice) -> Any:
    """Heads are counted from 0 on each rank."""
    return select(draws, slice(0, chosen.stop - chosen.start))


def by_own_documents(forward: Callable[..., Any], block: Any, x: Tensor, batch: Batch) -> Any:
    """Documents are counted in the columns of a rank, repeated."""
    own, whole = batch.documents, batch.whole_documents
    if own is not None and whole is not None:
        repeated = torch.cat([own] * (whole.shape[1] // own.shape[1]), 1)
        batch = replace(batch, whole_documents=repeated)
    return forward(block, x, batch)


@dataclass
class OtherMasksWhenRecomputed:
    """The forward that is repeated for the backward drops other entries."""

    def __call__(
        self, forward: Callable[..., Any], block: RecomputedBlock, x: Tensor, batch: Batch
    ) -> Any:
        inner = block.block
        num_calls = 0

        def call(own_x: Tensor, own_batch: Batch) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1 and own_batch.draw_keys is not None:
                own_batch = replace(own_batch, draw_keys=own_batch.draw_keys + 1)
            return inner(own_x, own_batch)

        return forward(RecomputedBlock(Calls(call), block.mode), x, batch)


ANY_AXIS = ("",)
DP = MutantLayout("dp2", family="gpt2", options=DROPOUT)
CP = MutantLayout("cp2", family="gpt2", options=DROPOUT)
TP = MutantLayout("tp2", family="gpt2", options=DROPOUT)

MUTANTS = (
    Mutant(
        "masks_of_every_step_are_those_of_the_first",
        "the step is not in the counter: the first step is right",
        DP,
        (FunctionFault(BATCHES, of_first_step),),
        axes=ANY_AXIS,
        blocks=FIRST,
    ),
    Mutant(
        "masks_are_those_of_the_next_step",
        "steps are counted from 1",
        DP,
        (FunctionFault(BATCHES, of_next_step),),
        axes=ANY_AXIS,
        blocks=FIRST,
    ),
    Mutant(
        "masks_have_a_seed_of_their_own",
        "another run of the same seed drops other entries",
        DP,
        (FunctionFault(KEYS, of_other_seed),),
        axes=ANY_AXIS,
        blocks=FIRST,
    ),
    Mutant(
        "all_sequences_of_a_step_have_one_mask",
        "dropout that is alike in a batch",
        MutantLayout("pp2", family="gpt2", options=DROPOUT),
        (FunctionFault(KEYS, same_in_each_sequence),),
        axes=ANY_AXIS,
        blocks=FIRST,
    ),
    Mutant(
        "data_ranks_drop_the_same_entries",
        "each rank seeds its generator alike",
        DP,
        (FunctionFault(BATCHES, same_on_data_ranks),),
        axes=ANY_AXIS,
        blocks=FIRST,
    ),
    Mutant(
        "an_evaluation_drops_out",
        "the loss of an evaluation is that of training",
        MutantLayout("dp2", family="gpt2", options=DROPOUT, evaluates=True),
        (FunctionFault(MICRO_BATCHES, in_evaluation),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "all_layers_drop_the_same_entries",
        "the block is not in the counter",
        MutantLayout("pp2", family="gpt2", options=DROPOUT),
        (FunctionFault(DROPPING_BLOCK, as_first_layer),),
        axes=ANY_AXIS,
        blocks=("layer1", "layer2"),
    ),
    Mutant(
        "a_recomputed_forward_drops_other_entries",
        "the generator is not restored: the loss is right, gradients are not",
        MutantLayout("dp2", family="gpt2", options=f"{DROPOUT} --parallel.recompute full"),
        (
            FunctionFault(
                "weft.parallel.recompute.blocks:RecomputedBlock.forward", OtherMasksWhenRecomputed()
            ),
        ),
        axes=ANY_AXIS,
        blocks=("layer*",),
    ),
    Mutant(
        "context_ranks_drop_by_their_own_columns",
        "masks are counted from the first column of a rank",
        CP,
        (FunctionFault(SHARDING_RANK, first_context_rank),),
        axes=(CP_AXIS,),
        blocks=("embed",),
    ),
    Mutant(
        "ring_attention_drops_by_the_columns_of_the_first_rank",
        "weights of attention are dropped at other queries",
        CP,
        (FunctionFault("weft.parallel.context.blocks:BlockAttention._columns_of", own_columns),),
        axes=(CP_AXIS,),
        blocks=("layer0",),
    ),
    Mutant(
        "ulysses_counts_heads_from_zero_on_every_rank",
        "heads of later ranks drop what those of the first one drop",
        MutantLayout("cp2", family="gpt2", options=f"{DROPOUT} --parallel.context ulysses"),
        (FunctionFault(SELECT_HEADS, all_heads_first),),
        axes=(CP_AXIS,),
        blocks=("layer0",),
    ),
    Mutant(
        "tensor_ranks_drop_by_their_own_heads",
        "heads of later ranks drop what those of the first one drop",
        TP,
        (FunctionFault(SHARDING_RANK, first_tensor_rank),),
        axes=(TP_AXIS,),
        blocks=("layer0",),
    ),
    Mutant(
        "adapters_drop_by_the_features_of_a_rank",
        "inputs of row-parallel linears have the masks of the first rank",
        MutantLayout("tp2", options="--lora.rank 3 --lora.dropout 0.1"),
        (FunctionFault(SHARDING_RANK, first_tensor_rank),),
        axes=(TP_AXIS,),
        blocks=("layer*",),
    ),
    Mutant(
        "sequence_parallel_ranks_drop_by_their_own_columns",
        "masks are counted from the first column of a rank",
        MutantLayout("tp2", family="gpt2", options=f"{DROPOUT} --parallel.sequence True"),
        (FunctionFault(SHARDING_RANK, first_tensor_rank),),
        axes=(TP_AXIS,),
        blocks=("embed",),
    ),
    Mutant(
        "context_ranks_have_the_noise_of_their_own_columns",
        "noise is counted from the first column of a rank",
        MutantLayout("cp2", options=NOISE),
        (FunctionFault(SHARDING_RANK, first_context_rank),),
        axes=(CP_AXIS,),
        blocks=("embed",),
    ),
    Mutant(
        "noise_has_the_amplitude_of_a_rank_s_part_of_a_document",
        "lengths are those of documents within the columns of a rank",
        MutantLayout("cp2", options=f"{NOISE} --parallel.context allgather", documents=True),
        (
            FunctionFault(
                "weft.parallel.model.dropout_blocks:DroppingBlock.forward", by_own_documents
            ),
        ),
        axes=(CP_AXIS,),
        blocks=("embed",),
    ),
)
