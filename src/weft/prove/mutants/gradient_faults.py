"""Mutants of gradient accumulation, reduction over ranks, ZeRO shards, norm and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.models.common.batch import Batch
from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.ep import AXIS as EP_AXIS
from weft.parallel.model.parallelize import ParamShard
from weft.parallel.pipeline.player import Player
from weft.parallel.pp import AXIS as PP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft.parallel.zero import grad_norm
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup
from weft.prove.mutants import references
from weft.prove.mutants.changes import nothing, returns
from weft.prove.mutants.fault import (
    CollectiveChange,
    CollectiveFault,
    FunctionFault,
    Mutant,
    MutantLayout,
)
from weft.train.step import TrainStep
from weft.train.step_stats import StepTotals

REDUCTION = "ParamGroup._start_collective"
RULE = "weft.parallel.model.parallelize:gradient_axes"
DP = MutantLayout("dp2")
ZERO1 = MutantLayout("dp2", options="--parallel.zero 1")
ZERO2 = MutantLayout("dp2", options="--parallel.zero 2")
ZERO3 = MutantLayout("dp2", options="--parallel.zero 3")
FREE_NORM = "--optim.clip 0"
HEAD = ("head",)
LOSS = ("loss", "")
STEP = ("",)


def _reduction(change: CollectiveChange, **rest: Any) -> tuple[CollectiveFault]:
    return (CollectiveFault(REDUCTION, change, **rest),)


def early_reduction(init: Callable[..., None], player: Player, *args: Any, **named: Any) -> None:
    """Mark the first micro-batch as the last one."""
    init(player, *args, **named)
    marked = {stage: act._replace(mb=0) for stage, act in player.last_backward.items()}
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
        views[self.one], views[self.other] = views[self.other], views[self.one]
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


def local_targets(
    counts: Callable[..., Tensor], step: TrainStep, batches: Sequence[Batch]
) -> Tensor:
    """This rank's own number of targets, times the number of data ranks."""
    own = torch.stack([batch.num_targets() for batch in batches]).sum().double()
    return own * step.model.comm.degree(DP_AXIS)


def masked_targets_too(
    counts: Callable[..., Tensor], step: TrainStep, batches: Sequence[Batch]
) -> Tensor:
    """The number of tokens, masked ones included."""
    num_tokens = sum(batch.targets.numel() for batch in batches)
    count = torch.tensor(float(num_tokens), dtype=torch.float64)
    return step.model.comm.all_reduce(count, DP_AXIS)


def seed_of_microbatch(backward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
    """Weigh each micro-batch by its own number of targets, as the mean of means does."""
    whole = state.seed
    batches = state.batches
    own = batches[act.mb].num_targets().clamp(min=1).double()
    total = torch.stack([batch.num_targets() for batch in batches]).sum().double()
    state.seed = whole * total / (own * len(batches))
    backward(player, state, act)
    state.seed = whole


def not_divided_by_microbatches(
    backward: Callable[..., None], player: Player, state: Any, act: Any
) -> None:
    """The gradient of every micro-batch as if it were alone in the step."""
    whole = state.seed
    state.seed = whole * len(state.batches)
    backward(player, state, act)
    state.seed = whole


def local_norm(total: Callable[..., StepTotals], step: TrainStep, *args: Any, **named: Any) -> Any:
    """The norm of this rank's gradients."""
    norm = grad_norm.squared_norm(step.model, step.grads).sqrt()
    return replace(total(step, *args, **named), grad_norm_tensor=norm, grad_norm=float(norm.item()))


def norm_of_rank_0(
    total: Callable[..., StepTotals], step: TrainStep, *args: Any, **named: Any
) -> Any:
    """Clip by the norm of this rank's gradients; the global norm is logged."""
    norm = grad_norm.squared_norm(step.model, step.grads).sqrt()
    return replace(total(step, *args, **named), grad_norm_tensor=norm)


def mean_norm(total: Callable[..., StepTotals], step: TrainStep, *args: Any, **named: Any) -> Any:
    """The mean over ranks of their norms, as where every rank holds every parameter."""
    comm = step.model.comm
    own = grad_norm.squared_norm(step.model, step.grads).sqrt()
    summed = comm.sum_world(own.unsqueeze(0))[0]
    norm = summed / comm.mesh.size
    totals = total(step, *args, **named)
    return replace(totals, grad_norm_tensor=norm, grad_norm=float(norm.item()))


def shards_count_once(
    is_first: Callable[..., bool], shard: ParamShard, comm: Any, sharded_over: Any
) -> bool:
    """Count the shards of the first rank alone, as of a replicated parameter."""
    return all(comm.index(axis) == 0 for axis, _ in comm.mesh.axes if axis != PP_AXIS)


def zero_shards_count_once(
    is_first: Callable[..., bool], shard: ParamShard, comm: Any, sharded_over: Any
) -> bool:
    """Count the ZeRO shard of the first rank alone."""
    return is_first(shard, comm, ())


def unclamped_factor(
    clip: Callable[..., None], reducer: GradientReducer, norm: Tensor, *, most: float, scale: float
) -> None:
    """Scale gradients to the largest norm, also smaller ones."""
    reducer.scale(most / (norm + 1e-6) / scale)


def clipped_per_group(
    clip: Callable[..., None], reducer: GradientReducer, norm: Tensor, *, most: float, scale: float
) -> None:
    """Clip each group by its own norm."""
    for group in reducer.groups:
        if group.sharded_grad is not None:
            own = group.sharded_grad.double().norm()
            factor = (most / (own + 1e-6)).clamp(max=1.0)
            group.sharded_grad.mul_(factor)


def logged_after_clipping(
    total: Callable[..., StepTotals], step: TrainStep, *args: Any, **named: Any
) -> Any:
    """Log the norm that clipping leaves."""
    totals = total(step, *args, **named)
    return replace(totals, grad_norm=min(totals.grad_norm, step.clip))


def stay_allocated(reshard: Callable[..., None], group: ParamGroup) -> None:
    """Never free the unsharded parameters, which are gathered where they are not allocated."""
    group._wait_all_gather()


MUTANTS = (
    Mutant(
        "gradients_are_never_reduced",
        "every data rank trains on its own gradients, also with several micro-batches",
        MutantLayout("dp2 tp2"),
        _reduction("skip"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "gradients_are_averaged_although_the_loss_is_normalised_globally",
        "gradients are 1 / dp too small, which AdamW hides from the loss",
        MutantLayout("pp2 dp2"),
        _reduction("avg"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "gradients_are_summed_twice",
        "the all-reduce runs again on its result: gradients are dp too large",
        DP,
        _reduction("twice"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.PYTORCH_EXPERTS,
    ),
    Mutant(
        "one_data_rank_sends_zeros",
        "the gradients of one rank are lost",
        DP,
        _reduction("zero", place=1),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "the_tail_of_the_bucket_is_not_reduced",
        "the all-reduce covers too few elements",
        DP,
        _reduction("truncate"),
        axes=(DP_AXIS,),
        blocks=("embed", "layer*", "head"),
    ),
    Mutant(
        "gradients_are_reduced_in_bfloat16",
        "sums over ranks lose 16 bits",
        DP,
        _reduction("bfloat16"),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "gradients_of_the_step_before_are_used",
        "the bucket is read before its reduction has ended",
        DP,
        _reduction("stale"),
        axes=(DP_AXIS,),
        blocks=HEAD,
        reference=references.DEEPSPEED_OVERLAP,
    ),
    Mutant(
        "one_reduction_is_dropped",
        "the all-reduce of the second step does not run",
        DP,
        _reduction("skip", call=1),
        axes=(DP_AXIS,),
        blocks=HEAD,
    ),
    Mutant(
        "gradients_are_summed_over_the_wrong_group",
        "data ranks sum over the tensor ranks",
        MutantLayout("dp2 tp2"),
        _reduction("group", axis=DP_AXIS, other_axis=TP_AXIS),
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
        _reduction("reverse", op="reduce_scatter"),
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
    Mutant(
        "the_loss_is_divided_by_this_ranks_own_number_of_targets",
        "wrong as soon as numbers of targets differ",
        MutantLayout("dp2", documents=True),
        (FunctionFault("weft.train.step:TrainStep._count_targets", local_targets),),
        axes=(DP_AXIS,),
        blocks=LOSS,
        reference=references.TRANSFORMERS_ACCUMULATION,
    ),
    Mutant(
        "masked_targets_are_counted",
        "the loss is divided by the number of tokens",
        MutantLayout("dp2", documents=True),
        (FunctionFault("weft.train.step:TrainStep._count_targets", masked_targets_too),),
        axes=("",),
        blocks=LOSS,
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "accumulation_is_the_mean_of_means",
        "micro-batches with few targets count as much as those with many",
        MutantLayout("", documents=True),
        (FunctionFault("weft.parallel.pipeline.player:Player._backward", seed_of_microbatch),),
        axes=("",),
        blocks=("loss",),
        reference=references.MLX_ACCUMULATION,
    ),
    Mutant(
        "targets_are_counted_over_dp_and_not_over_cp",
        "each context rank divides by its own number of targets",
        MutantLayout("dp2 cp2", documents=True),
        (CollectiveFault("TrainStep._count_targets", "group", other_axis=DP_AXIS),),
        axes=(CP_AXIS,),
        blocks=LOSS,
        reference=references.MEGATRON_CP_MASKS,
    ),
    Mutant(
        "the_number_of_targets_is_averaged_over_ranks",
        "gradients are dp too large",
        DP,
        (CollectiveFault("TrainStep._count_targets", "avg"),),
        axes=(DP_AXIS,),
        blocks=LOSS,
        reference=references.MEGATRON_CP_LOSS,
    ),
    Mutant(
        "gradients_are_not_divided_by_the_number_of_micro_batches",
        "the norm is 8.26 instead of 4.13, hidden by Adam",
        MutantLayout("pp2"),
        (
            FunctionFault(
                "weft.parallel.pipeline.player:Player._backward", not_divided_by_microbatches
            ),
        ),
        axes=("",),
        blocks=("loss",),
        reference=references.PICOTRON_AND_SCALETORCH,
    ),
    Mutant(
        "clipping_uses_the_norm_of_this_rank",
        "every rank clips by another factor",
        MutantLayout("pp2 tp2"),
        (FunctionFault("weft.train.step:TrainStep._total_stats", norm_of_rank_0),),
        axes=(PP_AXIS, TP_AXIS, "pp+tp"),
        blocks=STEP,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "norm_and_clipping_are_of_this_pipeline_stage",
        "the norm of a stage is logged and clipped by",
        MutantLayout("pp2"),
        (FunctionFault("weft.train.step:TrainStep._total_stats", local_norm),),
        axes=(PP_AXIS,),
        blocks=STEP,
        reference=references.TORCHTITAN_CLIPPING,
    ),
    Mutant(
        "norms_of_tensor_ranks_are_averaged",
        "each rank's norm is of its own shards",
        MutantLayout("tp2"),
        (FunctionFault("weft.train.step:TrainStep._total_stats", mean_norm),),
        axes=(TP_AXIS,),
        blocks=STEP,
        reference=references.TORCHTUNE_CLIPPING,
    ),
    Mutant(
        "norms_of_expert_ranks_are_averaged",
        "7.24 instead of 10.95",
        MutantLayout("ep2", family="qwen3-moe"),
        (FunctionFault("weft.train.step:TrainStep._total_stats", mean_norm),),
        axes=(EP_AXIS,),
        blocks=STEP,
        reference=references.DEEPSPEED_EXPERT_NORM,
    ),
    Mutant(
        "experts_of_other_ranks_do_not_count_in_the_norm",
        "experts are taken for replicated",
        MutantLayout("ep2", family="qwen3-moe"),
        (FunctionFault("weft.parallel.zero.grad_norm:_is_first_replica", shards_count_once),),
        axes=(EP_AXIS,),
        blocks=STEP,
        reference=references.COLOSSALAI_EXPERT_NORM,
    ),
    Mutant(
        "zero_shards_of_other_ranks_do_not_count_in_the_norm",
        "the norm is that of one shard",
        ZERO2,
        (FunctionFault("weft.parallel.zero.grad_norm:_is_first_replica", zero_shards_count_once),),
        axes=(DP_AXIS,),
        blocks=STEP,
    ),
    Mutant(
        "a_tied_parameter_counts_twice_in_the_norm",
        "the logged norm and the clipping are wrong",
        MutantLayout("pp2", family="gpt2"),
        (FunctionFault("weft.parallel.zero.grad_norm:is_first_holder", returns(True)),),
        axes=(PP_AXIS,),
        blocks=STEP,
    ),
    Mutant(
        "replicated_parameters_count_once_a_rank_in_the_norm",
        "norm weights count tp times",
        MutantLayout("tp2"),
        (FunctionFault("weft.parallel.zero.grad_norm:_is_first_replica", returns(True)),),
        axes=(TP_AXIS,),
        blocks=STEP,
    ),
    Mutant(
        "gradients_below_the_largest_norm_are_scaled_up",
        "the clip factor is not limited to 1",
        MutantLayout("dp2", options="--optim.clip 100"),
        (FunctionFault("weft.parallel.zero.grad_norm:clip", unclamped_factor),),
        axes=("",),
        blocks=STEP,
    ),
    Mutant(
        "every_parameter_group_is_clipped_by_its_own_norm",
        "directions of the gradient change",
        ZERO1,
        (FunctionFault("weft.parallel.zero.grad_norm:clip", clipped_per_group),),
        axes=("",),
        blocks=STEP,
    ),
    Mutant(
        "the_norm_is_logged_after_clipping",
        "the log says that all is well",
        DP,
        (FunctionFault("weft.train.step:TrainStep._total_stats", logged_after_clipping),),
        axes=("",),
        blocks=STEP,
    ),
    Mutant(
        "the_sum_of_norms_leaves_out_a_rank",
        "the statistics of the last rank are lost",
        MutantLayout("pp2"),
        (CollectiveFault("TrainStep._total_stats", "repeat"),),
        axes=(PP_AXIS,),
        blocks=("loss", ""),
    ),
    Mutant(
        "updated_shards_are_not_gathered",
        "under ZeRO 1 every rank trains on old values of the others' shards",
        MutantLayout("dp2 tp2", options="--parallel.zero 1"),
        (
            FunctionFault(
                "weft.parallel.zero.gradient_reducer:GradientReducer.after_optimizer_step",
                nothing,
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
