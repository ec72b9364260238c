"""Mutants of heads that compute losses chunk by chunk: weight gradients, sums over tp, masked targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.models.common.batch import IGNORE
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

CHUNKED = "--parallel.logits chunked"


def without_second_chunk(
    add: Callable[..., None], gradients: Any, x_CD: Tensor, *rest: Tensor
) -> None:
    """The second chunk of tokens adds nothing to the gradient of the weight."""
    before = gradients.weight
    is_second = before is not None and len(gradients.x) == 1
    kept = before.clone() if is_second else None
    add(gradients, x_CD, *rest)
    if kept is not None:
        gradients.weight = kept


def unsummed_last_chunk(total: Callable[..., Tensor], shard: Any, x: Tensor) -> Tensor:
    """A shorter chunk than the one before it is not summed over the ranks."""
    before = vars(shard).get("length_before", 0)
    vars(shard)["length_before"] = x.shape[-1]
    return x if x.shape[-1] < before else total(shard, x)


def masked_targets_as_first_entry(chunks: Callable[..., Any], self: Any, *operands: Any) -> Any:
    """Targets that do not count are those of the first entry of the vocabulary."""
    x, weight, bias, targets = operands
    return chunks(self, x, weight, bias, targets.where(targets != IGNORE, 0))


MUTANTS = (
    Mutant(
        "the_weight_gradient_of_a_chunk_is_lost",
        "the head learns from the other tokens alone",
        MutantLayout("dp2", options=CHUNKED),
        (FunctionFault("weft.models.common.head_output:_Gradients.add", without_second_chunk),),
        axes=(DP_AXIS, ""),
        blocks=("head",),
    ),
    Mutant(
        "a_chunk_of_losses_is_not_summed_over_tp",
        "the softmax of the last tokens is over this rank's part of the vocabulary",
        MutantLayout("tp2", options=CHUNKED),
        (
            FunctionFault(
                "weft.parallel.tensor.vocabulary_shard:VocabularyShard.total", unsummed_last_chunk
            ),
        ),
        axes=(TP_AXIS,),
        blocks=("head",),
    ),
    Mutant(
        "masked_targets_count_in_chunks",
        "tokens without a target have the loss of another",
        MutantLayout("dp2", options=CHUNKED, documents=True),
        (
            FunctionFault(
                "weft.models.common.head_output:_Chunks.of", masked_targets_as_first_entry
            ),
        ),
        axes=(DP_AXIS, ""),
        blocks=("head",),
    ),
)
