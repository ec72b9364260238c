"""Mutants of gathered parameters under ZeRO: not gathered, of an earlier step, or in another order."""

from __future__ import annotations

from collections.abc import Callable

from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.zero.param_group import ParamGroup
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import nothing
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout
from weft_selftest.mutants.gradient_faults import ZERO1, ZERO3


def stay_allocated(reshard: Callable[..., None], group: ParamGroup) -> None:
    """Never free the unsharded parameters, which are gathered where they are not allocated."""
    group._wait_all_gather()


MUTANTS = (
    Mutant(
        "updated_shards_are_not_gathered",
        "under ZeRO 1 every rank trains on old values of the others' shards",
        MutantLayout("dp2 tp2", options="--parallel.zero 1"),
        (
            FunctionFault(
                "weft.parallel.zero.gradient_reducer:GradientReducer.after_optimizer_step", nothing
            ),
        ),
        axes=(DP_AXIS,),
        blocks=("embed", "layer*", "head"),
    ),
    Mutant(
        "gathered_shards_are_those_of_the_step_before",
        "the all-gather of updated values is read too early",
        ZERO1,
        (CollectiveFault("ParamGroup.start_all_gather", "stale"),),
        axes=(DP_AXIS,),
        blocks=("embed", "layer*", "head"),
        reference=references.DEEPSPEED_OVERLAP,
    ),
    Mutant(
        "zero_3_keeps_parameters_of_the_step_before",
        "blocks that are never freed are never gathered again",
        ZERO3,
        (FunctionFault("weft.parallel.zero.param_group:ParamGroup.reshard", stay_allocated),),
        axes=(DP_AXIS,),
        blocks=("embed", "layer*", "head"),
    ),
    Mutant(
        "zero_3_gathers_shards_in_reverse_order",
        "the entries of a block are permuted",
        ZERO3,
        (CollectiveFault("ParamGroup.start_all_gather", "reverse"),),
        axes=(DP_AXIS,),
        blocks=("embed",),
    ),
    Mutant(
        "zero_3_gathers_the_first_shard_twice",
        "half of every block is a copy of the other half",
        ZERO3,
        (CollectiveFault("ParamGroup.start_all_gather", "repeat"),),
        axes=(DP_AXIS,),
        blocks=("embed",),
    ),
)
