"""Mutants of attention across ranks: heads of a rank, windows, documents, scales, and the backward of merged blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.comm import ops
from weft.models.common import attention_kernels as kernels
from weft.parallel.context.ulysses import COLUMNS, HEADS
from weft.parallel.cp import AXIS as CP_AXIS
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import returns
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

AXIS = (CP_AXIS,)
FIRST_LAYERS = ("layer0", "layer1")
LAYERS = ("layer*",)
RING = MutantLayout("cp2")
ULYSSES = "--parallel.context ulysses"
ULYSSES_MODULE = "weft.parallel.context.ulysses"
BLOCKS = "weft.parallel.context.blocks"


def heads_in_turn(x: Tensor, num_ranks: int) -> Tensor:
    """Heads in the order in which they would be dealt to ranks one by one."""
    return torch.cat([x[:, :, rank::num_ranks] for rank in range(num_ranks)], HEADS)


def dealt_in_turn(whole: Callable[..., Tensor], attention: Any, x: Tensor) -> Tensor:
    """Heads go to ranks one by one; their results are taken for consecutive ones."""
    return whole(attention, heads_in_turn(x, attention.comm.degree(CP_AXIS)))


def reversed_heads(own_columns: Callable[..., Tensor], attention: Any, x: Tensor) -> Tensor:
    """The heads of a rank return in reverse order."""
    return own_columns(attention, x.flip(HEADS))


def columns_as_they_are(own_columns: Callable[..., Tensor], attention: Any, x: Tensor) -> Tensor:
    """Results are handed out in the order of the sequence, not in that of the ranks' chunks."""
    return ops.all_to_all(x, attention.comm, CP_AXIS, COLUMNS, join_dim=HEADS)


def without_window(select: Callable[..., Any], spec: Any, heads: slice) -> Any:
    """The spec of a rank's heads has no window."""
    return replace(select(spec, heads), mask=replace(spec.mask, window=None))


def keys_in_turn(attend: Callable[..., Tensor], attention: Any, q: Tensor, *kv: Tensor) -> Tensor:
    """Query h reads key head h mod G, not the one of its group."""
    num_groups = kv[0].shape[HEADS]
    out = attend(attention, heads_in_turn(q, num_groups), *kv)
    num_heads = q.shape[HEADS]
    return heads_in_turn(out, num_heads // num_groups)


def last_block_of_queries(run_source: Callable[..., Any], backward: Any, *args: Any) -> Any:
    """The gradient of queries is that of the keys that arrived last."""
    backward.dq.zero_()
    return run_source(backward, *args)


def own_weights(
    backward: Callable[..., Any], block: Any, output: kernels.BlockOutput, scores: Any
) -> Any:
    """A block's weights are normalised over the block, not over all keys."""
    _, lse = kernels.attend(block.q, block.k, block.v, scores)
    lse = torch.where(torch.isfinite(lse), lse, output.lse)
    return backward(block, output._replace(lse=lse), scores)


def window_of_own_keys(
    mask: Callable[..., Tensor | None], attention: Any, block: Any, source: int, device: Any
) -> Tensor | None:
    """Keys of other ranks are seen at any distance."""
    if source != attention.exchange.index:
        wide = replace(attention.spec.mask, window=None)
        attention = replace(attention, spec=replace(attention.spec, mask=wide))
    return mask(attention, block, source, device)


def without_last_turn(has_work: Callable[..., bool], blocks: Any, turn: int) -> bool:
    """The last turn of the ring is taken for one without work."""
    return turn < blocks.num_ranks - 1 and has_work(blocks, turn)


def last_documents(ranges: Callable[..., Any], whole: Tensor, num_ranks: int) -> Any:
    """A chunk is taken for a part of its last document."""
    found = ranges(whole, num_ranks)
    if found is None:
        return None
    return tuple(tuple((last, last) for _, last in row) for row in found)


def default_scale(scale_of: Callable[..., float], spec: Any, q: Tensor) -> float:
    """Scores are divided by the root of the head size, whatever the model says."""
    return float(q.shape[-1] ** -0.5)


def without_farthest_key(
    part: Callable[..., Any], mask: Any, queries: range, keys: range
) -> tuple[range, range]:
    """The first key of another chunk that a chunk of queries sees is cut off."""
    seen_queries, seen_keys = part(mask, queries, keys)
    is_cut = queries != keys and len(seen_keys) > 1
    return seen_queries, seen_keys[1:] if is_cut else seen_keys


def first_row(whole: Callable[..., Tensor | None], batch: Any) -> Tensor | None:
    """Documents of the first sequence stand for those of a micro-batch."""
    found = whole(batch)
    return None if found is None else found[:1].expand_as(found)


def heads_of_first_rank(numbers: Callable[..., list[int]], own: Any, num_shared: int) -> list[int]:
    """Every rank reads the shared heads that the queries of the first rank read."""
    return numbers(replace(own, first=0), num_shared)


MUTANTS = (
    Mutant(
        "ranks_read_the_shared_heads_of_the_first_rank",
        "keys and values are whole where tp does not divide their heads",
        MutantLayout(
            "tp8", family="qwen3-moe", options="--model.heads 8 --model.kv_heads 4 --model.dim 32"
        ),
        (FunctionFault("weft.models.common.attention:OwnHeads.numbers", heads_of_first_rank),),
        axes=("tp",),
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "heads_are_dealt_in_turn_on_the_way_to_whole_sequences",
        "a rank's results are taken for those of other heads",
        MutantLayout("cp2", options=ULYSSES),
        (FunctionFault(f"{ULYSSES_MODULE}:UlyssesAttention._whole_sequences", dealt_in_turn),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "heads_of_a_rank_return_in_reverse_order",
        "visible only where a rank has several heads",
        MutantLayout("cp2", family="gpt2", options=ULYSSES),
        (FunctionFault(f"{ULYSSES_MODULE}:UlyssesAttention._own_columns", reversed_heads),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "columns_return_in_the_order_of_the_sequence",
        "ranks hold two chunks, and get two consecutive ones",
        MutantLayout("cp2 tp2", options=f"{ULYSSES} --model.heads 8 --model.kv_heads 4"),
        (FunctionFault(f"{ULYSSES_MODULE}:UlyssesAttention._own_columns", columns_as_they_are),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "whole_sequences_have_no_documents",
        "tokens see other documents where heads are exchanged",
        MutantLayout("cp2", options=ULYSSES, documents=True),
        (FunctionFault(f"{ULYSSES_MODULE}:whole_documents_of", returns(None)),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "the_window_is_lost_with_the_other_heads",
        "a rank's own heads attend without the window",
        MutantLayout("cp2", family="mistral", options=ULYSSES),
        (FunctionFault("weft.models.common.attention:AttentionSpec.select_heads", without_window),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "grouped_queries_read_keys_in_turn",
        "visible only where a rank has several heads of keys",
        RING,
        (FunctionFault(f"{BLOCKS}:BlockAttention.__call__", keys_in_turn),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "gradients_of_queries_are_those_of_the_keys_that_came_last",
        "a forward that is right, and a backward that forgets sources",
        RING,
        (FunctionFault(f"{BLOCKS}:_BackwardPass.run_source", last_block_of_queries),),
        axes=AXIS,
        blocks=LAYERS,
        reference=references.TRANSFORMER_ENGINE_CP,
    ),
    Mutant(
        "the_backward_normalises_every_block_by_itself",
        "weights of a block's keys add up to one, as if there were no others",
        MutantLayout("cp2", options="--parallel.context allgather"),
        (FunctionFault("weft.models.common.attention_kernels:attend_backward", own_weights),),
        axes=AXIS,
        blocks=LAYERS,
        reference=references.TRANSFORMER_ENGINE_CP,
    ),
    Mutant(
        "the_window_ends_at_the_border_of_a_rank",
        "keys of other ranks are seen at any distance",
        MutantLayout("cp2", family="mistral"),
        (FunctionFault(f"{BLOCKS}:BlockAttention._mask", window_of_own_keys),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "a_turn_of_the_ring_is_left_out_that_has_work",
        "with a window, ranks next to each other meet in the last turn",
        MutantLayout("cp4", family="mistral"),
        (FunctionFault("weft.core.sequence:SequenceBlocks._has_work", without_last_turn),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "a_chunk_is_taken_for_a_part_of_its_last_document",
        "blocks are skipped, or not masked, where a chunk holds several documents",
        MutantLayout("cp2", documents=True),
        (FunctionFault("weft.parallel.context.attend:document_ranges", last_documents),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "the_scale_of_a_model_is_lost_across_ranks",
        "scores of blocks have the default scale",
        MutantLayout("cp2", family="gemma3", options="--model.query_pre_attn_scalar 168"),
        (FunctionFault("weft.models.common.attention:AttentionSpec.scale_of", default_scale),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "the_farthest_key_of_a_window_is_cut_off",
        "blocks are narrowed by one column too many",
        MutantLayout("cp2", family="mistral"),
        (
            FunctionFault(
                "weft.core.attention_mask:AttentionMask.visible_part", without_farthest_key
            ),
        ),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
    Mutant(
        "documents_of_the_first_sequence_stand_for_the_micro_batch",
        "other sequences are masked by the wrong borders",
        MutantLayout("cp2", options="--batch.micro_size 2", documents=True),
        (FunctionFault("weft.parallel.context.attend:whole_documents_of", first_row),),
        axes=AXIS,
        blocks=FIRST_LAYERS,
    ),
)
