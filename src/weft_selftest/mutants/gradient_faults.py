"""Mutants of gradients: their reduction over ranks and their sums over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.pipeline.player import Player
from weft.parallel.tp import AXIS as TP_AXIS
from weft.parallel.zero.param_group import ParamGroup
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import nothing, returns
from weft_selftest.mutants.fault import (
    CollectiveChange,
    CollectiveFault,
    FunctionFault,
    Mutant,
    MutantLayout,
)

REDUCTION = "ParamGroup._start_collective"
RULE = "weft.parallel.model.parallelize:gradient_axes"
DP = MutantLayout("dp2")
ZERO1 = MutantLayout("dp2", options="--parallel.zero 1")
ZERO2 = MutantLayout("dp2", options="--parallel.zero 2")
ZERO3 = MutantLayout("dp2", options="--parallel.zero 3")
HEAD = ("head",)
LOSS = ("loss", "")
STEP = ("",)


def reduction(change: CollectiveChange, **rest: Any) -> tuple[CollectiveFault]:
    """A fault of the reduction of gradients."""
    return (CollectiveFault(REDUCTION, change, **rest),)


def early_reduction(init: Callable[..., None], player: Player, *args: Any, **named: Any) -> None:
    """Mark the first micro-batch as the last one."""
    init(player, *args, **named)
    marked = {}
    for stage, action in player.last_backward.items():
        marked[stage] = action._replace(mb=0)
    player.last_backward = marked


class SwappedViews:
    """Swap the gradients of two norms in the bucket of one rank."""

    one = "layer0.attn_norm.weight"
    other = "layer0.mlp_norm.weight"

    def __call__(
        self, init: Callable[..., None], group: ParamGroup, *args: Any, **named: Any
    ) -> None:
        init(group, *args, **named)
        is_bucket = {self.one, self.other} <= group.params.keys()
        if not is_bucket or group.comm.index(DP_AXIS) != 0:
            return
        views = group._grad_views
        view_of_one = views[self.one]
        views[self.one] = views[self.other]
        views[self.other] = view_of_one
        for name in (self.one, self.other):
            group.params[name].grad = views[name]


def tp_instead_of_dp(rule: Callable[..., Any], mesh: Any, *, varies: Any, sharded: Any) -> Any:
    """Sum replicated parameters over tp."""
    return (TP_AXIS,) if not sharded else ()


def without_axis(axis: str) -> Callable[..., Any]:
    """The gradient rule without one axis."""

    def axes(rule: Callable[..., Any], mesh: Any, *, varies: Any, sharded: Any) -> Any:
        found = rule(mesh, varies=varies, sharded=sharded)
        return tuple(name for name in found if name != axis)

    return axes


def skip_embedding(start: Callable[..., Any], group: ParamGroup, unsharded: Tensor) -> Any:
    """Leave the gradient of the embedding on its rank."""
    if "embed.tok.weight" not in group.params:
        return start(group, unsharded)
    axes = group.axes
    group.axes = ()
    try:
        return start(group, unsharded)
    finally:
        group.axes = axes


def reduce_layer_twice(start: Callable[..., Any], group: ParamGroup, unsharded: Tensor) -> Any:
    """Sum the gradients of layer1 over the ranks two times."""
    if any(name.startswith("layer1.") for name in group.params):
        group.comm.all_reduce_(unsharded, group.axes)
    return start(group, unsharded)


def overwrite_shard(wait: Callable[..., None], group: ParamGroup) -> None:
    """Keep the reduced gradient of the last micro-batch alone."""
    if group._reducing is not None and group.sharded_grad is not None:
        group.sharded_grad.zero_()
    wait(group)


def mean_under_zero(policy_of: Callable[..., Any], plan: Any) -> Any:
    """Divide reduced gradients by the number of ranks, as where each loss is a mean."""
    return replace(policy_of(plan), grad_scale=1.0 / plan.num_data_ranks)


def overwritten_gradients(
    backward: Callable[..., None], player: Player, state: Any, act: Any
) -> None:
    """Set gradients to zero before each backward."""
    for param in player._params[act.stage]:
        if param.grad is not None:
            param.grad.zero_()
    backward(player, state, act)


MUTANTS = (
    Mutant(
        "gradients_are_never_reduced",
        "every data rank trains on its own gradients, also with several micro-batches",
        MutantLayout("dp2 tp2"),
        reduction("skip"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "gradients_are_averaged_although_the_loss_is_normalised_globally",
        "gradients are 1 / dp too small, which AdamW hides from the loss",
        MutantLayout("pp2 dp2"),
        reduction("avg"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "gradients_are_summed_twice",
        "the all-reduce runs again on its result: gradients are dp too large",
        DP,
        reduction("twice"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.PYTORCH_EXPERTS,
    ),
    Mutant(
        "one_data_rank_sends_zeros",
        "the gradients of one rank are lost",
        DP,
        reduction("zero", place=1),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "the_tail_of_the_bucket_is_not_reduced",
        "the all-reduce covers too few elements",
        DP,
        reduction("truncate"),
        axes=(DP_AXIS,),
        blocks=("embed", "layer*", "head"),
    ),
    Mutant(
        "gradients_are_reduced_in_bfloat16",
        "sums over ranks lose 16 bits",
        DP,
        reduction("bfloat16"),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "gradients_of_the_step_before_are_used",
        "the bucket is read before its reduction has ended",
        DP,
        reduction("stale"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.DEEPSPEED_OVERLAP,
    ),
    Mutant(
        "one_reduction_is_dropped",
        "the all-reduce of the second step does not run",
        DP,
        reduction("skip", call=1),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "gradients_are_summed_over_the_wrong_group",
        "data ranks sum over the tensor ranks",
        MutantLayout("dp2 tp2"),
        reduction("group", axis=DP_AXIS, other_axis=TP_AXIS),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "two_parameters_are_swapped_in_one_ranks_bucket",
        "two gradients of equal shape are summed crosswise",
        DP,
        (FunctionFault("weft.parallel.zero.param_group:ParamGroup.__init__", SwappedViews()),),
        axes=(DP_AXIS,),
        blocks=("layer0",),
    ),
    Mutant(
        "gradients_are_reduced_after_the_first_micro_batch",
        "the gradients of later micro-batches stay local",
        MutantLayout("dp2", options="--batch.global_size 6"),
        (FunctionFault("weft.parallel.pipeline.player:Player.__init__", early_reduction),),
        axes=("",),  # late gradients end the run with an error, on one rank, too
        blocks=("head",),
        reference=references.SCALETORCH,
    ),
    Mutant(
        "the_gradient_rule_names_the_wrong_axis",
        "replicated parameters are summed over tp instead of dp",
        MutantLayout("dp2 tp2"),
        (FunctionFault(RULE, tp_instead_of_dp),),
        axes=(DP_AXIS, TP_AXIS, "dp+tp"),
        blocks=HEAD,
    ),
    Mutant(
        "norms_under_sequence_parallelism_are_not_summed_over_tp",
        "each rank's norm has the gradient of its own tokens",
        MutantLayout("tp2", options="--parallel.sequence True"),
        (FunctionFault(RULE, returns(())),),
        axes=(TP_AXIS,),
        blocks=HEAD,
        reference=references.MEGATRON_NORMS,
    ),
    Mutant(
        "gradients_are_not_reduced_over_cp",
        "each rank learns from its own columns",
        MutantLayout("cp2"),
        (FunctionFault(RULE, returns(())),),
        axes=(CP_AXIS,),
        blocks=HEAD,
        reference=references.PICOTRON_AND_SCALETORCH,
    ),
    Mutant(
        "gradients_are_reduced_over_dp_but_not_over_cp",
        "where both exist, one is forgotten",
        MutantLayout("dp2 cp2"),
        (FunctionFault(RULE, without_axis(CP_AXIS)),),
        axes=(CP_AXIS,),
        blocks=HEAD,
        reference=references.PICOTRON,
    ),
    Mutant(
        "gradients_are_reduced_over_cp_but_not_over_dp",
        "where both exist, one is forgotten",
        MutantLayout("dp2 cp2"),
        (FunctionFault(RULE, without_axis(DP_AXIS)),),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "the_gradient_of_the_embedding_is_not_reduced",
        "one parameter group stays local",
        ZERO1,
        (
            FunctionFault(
                "weft.parallel.zero.param_group:ParamGroup._start_collective", skip_embedding
            ),
        ),
        axes=(DP_AXIS,),
        blocks=("embed",),
    ),
    Mutant(
        "the_gradients_of_one_layer_are_reduced_twice",
        "layer1 learns dp times as fast",
        ZERO1,
        (
            FunctionFault(
                "weft.parallel.zero.param_group:ParamGroup._start_collective", reduce_layer_twice
            ),
        ),
        axes=(DP_AXIS,),
        blocks=("layer1",),
    ),
    Mutant(
        "reduce_scatter_hands_out_the_shards_in_reverse_order",
        "every rank updates its shard by the gradient of another",
        ZERO2,
        reduction("reverse", op="reduce_scatter"),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "the_reduced_shard_of_the_last_micro_batch_replaces_the_others",
        "under ZeRO 2 the sum over micro-batches is lost",
        ZERO2,
        (FunctionFault("weft.parallel.zero.param_group:ParamGroup.wait_reduce", overwrite_shard),),
        axes=("",),
        blocks=HEAD,
        reference=references.AUTOMODEL_LOST_MICROBATCHES,
    ),
    Mutant(
        "zero_2_averages_gradients",
        "gradients are 1 / dp too small under ZeRO 2 alone",
        ZERO2,
        (FunctionFault("weft.parallel.zero.grouping:sharding_policy", mean_under_zero),),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "a_backward_overwrites_the_gradients_of_the_one_before",
        "only the last micro-batch trains the model",
        DP,
        (FunctionFault("weft.parallel.pipeline.player:Player._backward", overwritten_gradients),),
        axes=("",),
        blocks=HEAD,
        reference=references.AUTOMODEL_LOST_MICROBATCHES,
    ),
    Mutant(
        "gradients_are_not_set_to_zero_between_steps",
        "every step adds to the gradients of all before",
        DP,
        (FunctionFault("weft.parallel.zero.gradient_reducer:GradientReducer.zero_grad", nothing),),
        axes=("",),
        blocks=HEAD,
    ),
)
