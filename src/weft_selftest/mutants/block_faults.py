"""Mutants of attention in blocks on one device: borders of documents and of windows, and heads of keys that queries share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from weft.core.query_blocks import RowBlock, RowRuns
from weft.models.common.attention_kernels import Block, BlockGradients, BlockOutput
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

ANY_AXIS = ("",)
LAYER = ("layer0",)
LONG = "--data.seq_len 512"
"""Shorter sequences are computed at once; a proof computes its own ones in blocks, too."""
ROW_BLOCKS = "weft.models.common.attention:row_blocks"
BACKWARD = "weft.models.common.attention_kernels:attend_backward"


def documents_that_end_early(
    blocks: Callable[..., tuple[RowBlock, ...]],
    call: Any,
    device: Any,
    runs: tuple[RowRuns, ...] | None,
) -> tuple[RowBlock, ...]:
    """The last token of each document but the last one stands in the next document."""
    if runs is None:
        return blocks(call, device, None)
    return blocks(call, device, tuple(map(_shifted, runs)))


def _shifted(runs: RowRuns) -> RowRuns:
    if runs is None:
        return None
    starts = {0, *(run.start - 1 for run in runs[1:])}
    borders = [*sorted(starts), runs[-1].stop]
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def windows_cut_at_blocks(
    blocks: Callable[..., tuple[RowBlock, ...]], *args: Any
) -> tuple[RowBlock, ...]:
    """The farthest key of a block before its queries is taken for one out of sight."""

    def cut(block: RowBlock) -> RowBlock:
        if block.keys.start == block.queries.start:
            return block
        return replace(block, keys=slice(block.keys.start + 1, block.keys.stop))

    return tuple(map(cut, blocks(*args)))


def gradients_of_first_heads(
    backward: Callable[..., BlockGradients],
    block: Block,
    output: BlockOutput,
    scores: Any,
    **options: Any,
) -> BlockGradients:
    """Keys and values get the gradient of the first one of the query heads that share them."""
    found = backward(block, output, scores, **options)
    group_size = block.q.shape[1] // block.k.shape[1]
    alone = output._replace(grad=_of_first_heads(output.grad, group_size))
    of_first = backward(block, alone, scores, **options)
    return found._replace(k=of_first.k, v=of_first.v)


def _of_first_heads(x_BHSW: Tensor, group_size: int) -> Tensor:
    others = x_BHSW.clone()
    by_group = others.unflatten(1, (-1, group_size))
    by_group[:, :, 1:] = 0
    return others


MUTANTS = (
    Mutant(
        "the_last_token_of_a_document_is_computed_with_the_next_one",
        "blocks of documents end one column early",
        MutantLayout("dp2", options=LONG, documents=True),
        (FunctionFault(ROW_BLOCKS, documents_that_end_early),),
        axes=ANY_AXIS,
        blocks=LAYER,
    ),
    Mutant(
        "a_window_is_one_key_short_at_the_border_of_a_block",
        "the first query of a block misses its farthest key",
        MutantLayout("dp2", family="mistral", options=LONG),
        (FunctionFault(ROW_BLOCKS, windows_cut_at_blocks),),
        axes=ANY_AXIS,
        blocks=LAYER,
    ),
    Mutant(
        "gradients_of_shared_heads_of_keys_are_not_summed",
        "a head of keys learns from one of its query heads",
        MutantLayout("dp2", options=LONG, documents=True),
        (FunctionFault(BACKWARD, gradients_of_first_heads),),
        axes=ANY_AXIS,
        blocks=("layer*",),
    ),
)
