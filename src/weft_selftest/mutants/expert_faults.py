"""Mutants of mixtures of experts: dispatch, expert gradients, balance losses, router statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.ep import AXIS as EP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import named_argument, nothing, result_times, without_gradient
from weft_selftest.mutants.fault import (
    CollectiveFault,
    FunctionFault,
    ModuleFault,
    Mutant,
    MutantLayout,
)
from weft_selftest.mutants.pipeline_faults import CHAIN, extra_losses_times, without_extra_losses
from weft_selftest.mutants.tensor_faults import INIT, first_shard_of, partial_without

EP = MutantLayout("ep2", family="qwen3-moe")
AXIS = (EP_AXIS,)
DISPATCH = "weft.parallel.expert.dispatch:ExpertParallelDispatch.forward"
FINISH = "weft.parallel.zero.gradient_reducer:GradientReducer.finish"
FIRST_MIXTURE = ("layer0",)
LAST_MIXTURE = ("layer2",)


def expert_gradients_times_degree(finish: Callable[..., None], reducer: GradientReducer) -> None:
    """Gradients of experts are multiplied by the number of expert ranks after the reduction."""
    finish(reducer)
    for name, param in reducer.sharded_params.items():
        if ".experts." in name and param.grad is not None:
            param.grad.mul_(reducer.comm.degree(EP_AXIS))


def last_expert_without_gradient(finish: Callable[..., None], reducer: GradientReducer) -> None:
    """The last expert of all gets no gradient."""
    finish(reducer)
    comm = reducer.comm
    is_last = comm.index(EP_AXIS) == comm.degree(EP_AXIS) - 1
    for name, param in reducer.sharded_params.items():
        if ".experts." in name and param.grad is not None and is_last:
            param.grad[-1].zero_()


def loads_of_next_experts(
    loads: Callable[..., Any], counts: Tensor, on_host: tuple[int, ...], planned: Any
) -> Any:
    """Tokens of an expert begin where those of the one before it do."""
    first, *others = on_host
    return loads(counts.roll(-1), (*others, first), planned)


def experts_summed_over_ep(
    rule: Callable[..., Any], mesh: Any, *, varies: Any, sharded: Any
) -> Any:
    """Experts are summed over the ranks that hold other experts."""
    kept = tuple(axis for axis in sharded if axis != EP_AXIS)
    return rule(mesh, varies=varies, sharded=kept)


def local_sums(sums: Callable[..., Any], balance: Any, counts: Tensor, targets: Tensor) -> Any:
    """Counts of this rank's tokens."""
    return counts, targets


def last_token_dropped(
    forward: Callable[..., Tensor],
    dispatch: Any,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Any,
) -> Tensor:
    """The last token exceeds the capacity of its experts."""
    kept = weights.clone()
    kept[-1] = 0
    return forward(dispatch, x, chosen, kept, experts)


def exchanged_weights(
    forward: Callable[..., Tensor],
    dispatch: Any,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Any,
) -> Tensor:
    """The weights of a token's experts are exchanged."""
    return forward(dispatch, x, chosen, weights.flip(-1), experts)


MUTANTS = (
    Mutant(
        "the_all_to_all_has_no_backward",
        "0 of 6 experts receive a gradient",
        EP,
        (FunctionFault("weft.comm.ops:all_to_all", without_gradient),),
        axes=AXIS,
        blocks=LAST_MIXTURE,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "gradients_of_experts_are_twice_too_large",
        "dense parameters are averaged, experts are summed",
        MutantLayout("dp2 ep2", family="qwen3-moe"),
        (FunctionFault(FINISH, expert_gradients_times_degree),),
        axes=AXIS,
        blocks=LAST_MIXTURE,
        reference=references.PYTORCH_EXPERTS,
    ),
    Mutant(
        "gradients_of_experts_are_summed_over_expert_ranks",
        "experts of different ranks are mixed up",
        EP,
        (FunctionFault("weft.parallel.model.parallelize:gradient_axes", experts_summed_over_ep),),
        axes=AXIS,
        blocks=LAST_MIXTURE,
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "expert_ranks_start_with_identical_experts",
        "half of the experts are copies",
        EP,
        (FunctionFault(INIT, first_shard_of(".experts.")),),
        axes=AXIS,
        blocks=FIRST_MIXTURE,
        reference=references.PICOTRON_AND_SCALETORCH,
    ),
    Mutant(
        "tokens_go_to_the_experts_of_another_rank",
        "the pieces of an all-to-all are swapped",
        MutantLayout("dp2 ep2", family="qwen3-moe"),
        (CollectiveFault("ExpertParallelDispatch.forward", "reverse", op="all_to_all"),),
        axes=AXIS,
        blocks=FIRST_MIXTURE,
    ),
    Mutant(
        "tokens_of_experts_begin_at_those_of_another_expert",
        "offsets of a grouped product are shifted by one expert",
        MutantLayout("ep2", family="qwen3-moe", options="--precision.compute bfloat16"),
        (FunctionFault("weft.parallel.expert.dispatch:ExpertLoads", loads_of_next_experts),),
        axes=AXIS,
        blocks=FIRST_MIXTURE,
    ),
    Mutant(
        "the_gradient_of_an_expert_is_lost",
        "an expert stays as it was drawn",
        EP,
        (FunctionFault(FINISH, last_expert_without_gradient),),
        axes=("",),
        blocks=LAST_MIXTURE,
    ),
    Mutant(
        "tokens_above_a_capacity_are_dropped",
        "the last token of every rank has no expert",
        EP,
        (FunctionFault(DISPATCH, last_token_dropped),),
        axes=AXIS,
        blocks=FIRST_MIXTURE,
    ),
    Mutant(
        "weights_of_returned_tokens_are_exchanged",
        "the order of a token's experts is lost on the way",
        EP,
        (FunctionFault(DISPATCH, exchanged_weights),),
        axes=AXIS,
        blocks=FIRST_MIXTURE,
    ),
    Mutant(
        "the_balance_loss_is_never_added",
        "its result is dropped",
        EP,
        (FunctionFault(CHAIN, without_extra_losses),),
        axes=("",),
        blocks=("layer0", "layer2", "loss", ""),
        reference=references.AUTOMODEL_AUXILIARY,
    ),
    Mutant(
        "the_balance_loss_is_divided_by_the_number_of_data_ranks",
        "it is averaged where the loss is summed",
        EP,
        (FunctionFault(CHAIN, extra_losses_times(0.5)),),
        axes=("",),
        blocks=("layer0", "layer2", "loss", ""),
        reference=references.MEGATRON_AUXILIARY_DP,
    ),
    Mutant(
        "the_balance_loss_counts_on_every_tensor_rank",
        "it is tp times too large",
        MutantLayout("tp2", family="qwen3-moe"),
        (
            FunctionFault(
                "weft.parallel.expert.dispatch:ShardedBalance.__init__",
                named_argument("counts", True),
            ),
        ),
        axes=(TP_AXIS,),
        blocks=("layer0", "layer2", "loss", ""),
        reference=references.MEGATRON_AUXILIARY_TP,
    ),
    Mutant(
        "the_balance_loss_uses_the_counts_of_this_ranks_columns",
        "the share of an expert is that of half a sequence",
        MutantLayout("cp2", family="qwen3-moe"),
        (FunctionFault("weft.parallel.expert.dispatch:ShardedBalance.sums", local_sums),),
        axes=(CP_AXIS,),
        blocks=("layer0", "layer2", "loss", ""),
    ),
    Mutant(
        "the_gradient_of_the_router_is_not_summed_over_tp",
        "each rank's router learns from its own features",
        MutantLayout("tp2", family="qwen3-moe"),
        (
            FunctionFault(
                "weft.parallel.tensor.transform:_every_name", partial_without("router.proj.weight")
            ),
        ),
        axes=(TP_AXIS,),
        blocks=LAST_MIXTURE,
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_load_of_experts_is_that_of_this_rank",
        "biases of routers drift apart",
        MutantLayout("dp2 tp2", family="deepseek"),
        (CollectiveFault("sum_loads", "skip"),),
        axes=(DP_AXIS,),
        blocks=("layer1", "layer2", "mtp0"),
    ),
    Mutant(
        "biases_of_routers_are_never_updated",
        "the load is never balanced",
        MutantLayout("dp2", family="deepseek"),
        (FunctionFault("weft.train.step:rebalance_routers", nothing),),
        axes=("",),
        blocks=("layer1", "layer2", "mtp0"),
    ),
    Mutant(
        "the_shared_expert_counts_once_a_tensor_rank",
        "its output is summed although it is whole",
        MutantLayout("tp2", family="deepseek"),
        (ModuleFault("layer1.mlp.shared", result_times(2.0), axis=TP_AXIS),),
        axes=(TP_AXIS,),
        blocks=("layer1",),
    ),
)
