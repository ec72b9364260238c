"""Mutants of the number of targets, by which the loss is divided, of the gradient norm, and of clipping."""

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
from weft.train.step import TrainStep
from weft.train.step_stats import PendingTotals, StepTotals
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import ChangedTotals, returns
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout
from weft_selftest.mutants.gradient_faults import DP, LOSS, STEP, ZERO1, ZERO2


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
    numbers = [batch.num_targets() for batch in state.batches]
    own = numbers[act.mb].clamp(min=1).double()
    total = torch.stack(numbers).sum().double()
    state.seed = whole * total / (own * len(numbers))
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


def local_norm(
    total: Callable[..., PendingTotals], step: TrainStep, *args: Any, **named: Any
) -> PendingTotals:
    """The norm of this rank's gradients."""
    norm = _norm_of_rank(step)
    return with_norm(total(step, *args, **named), norm)


def norm_of_rank_0(
    total: Callable[..., PendingTotals], step: TrainStep, *args: Any, **named: Any
) -> PendingTotals:
    """Clip by the norm of this rank's gradients; the global norm is logged."""
    norm = _norm_of_rank(step)
    totals = total(step, *args, **named)
    return ChangedTotals(totals, lambda numbers: numbers, norm)


def mean_norm(
    total: Callable[..., PendingTotals], step: TrainStep, *args: Any, **named: Any
) -> PendingTotals:
    """The mean over ranks of their norms, as where every rank holds every parameter."""
    comm = step.model.comm
    own = _norm_of_rank(step)
    summed = comm.sum_world(own.unsqueeze(0))[0]
    norm = summed / comm.mesh.size
    return with_norm(total(step, *args, **named), norm)


def _norm_of_rank(step: TrainStep) -> Tensor:
    square = grad_norm.squared_norm(step.model, step.grads)
    return square.sqrt()


def with_norm(totals: PendingTotals, norm: Tensor) -> PendingTotals:
    """The same totals with another norm, which is logged and by which gradients are clipped."""
    value = float(norm.item())
    return ChangedTotals(totals, lambda numbers: replace(numbers, grad_norm=value), norm)


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
    total: Callable[..., PendingTotals], step: TrainStep, *args: Any, **named: Any
) -> PendingTotals:
    """Log the norm that clipping leaves."""

    def clipped(numbers: StepTotals) -> StepTotals:
        return replace(numbers, grad_norm=min(numbers.grad_norm, step.clip))

    return ChangedTotals(total(step, *args, **named), clipped)


MUTANTS = (
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
)
