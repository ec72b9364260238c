"""Mutants of routing: capacity, weights, biases and loads of experts, gradients of routers and shared experts over ep and tp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.models.common.experts import count_experts
from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.ep import AXIS as EP_AXIS
from weft.parallel.model.parallelize import ParamShard
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.fault import (
    FunctionChange,
    FunctionFault,
    ModuleFault,
    Mutant,
    MutantLayout,
)

DISPATCH = "weft.parallel.expert.dispatch:ExpertParallelDispatch.forward"
SHARD = "weft.parallel.model.parallelize:_shard"
LAYERS = ("layer*", "mtp*")
CAPACITY = 2


def with_capacity(
    forward: Callable[..., Tensor],
    dispatch: Any,
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    experts: nn.Module,
) -> Tensor:
    """Of each expert's tokens those beyond twice the mean have weight 0."""
    num_slots = experts_NK.numel()
    most = CAPACITY * -(-num_slots // dispatch.num_experts)
    is_chosen = torch.nn.functional.one_hot(experts_NK.flatten(), dispatch.num_experts)
    number = (is_chosen.cumsum(0) * is_chosen).sum(-1).view_as(experts_NK)
    kept = weights_NK * (number <= most)
    return forward(dispatch, x_ND, experts_NK, kept, experts)


def constant_weights(
    forward: Callable[..., Tensor],
    dispatch: Any,
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    experts: nn.Module,
) -> Tensor:
    """Routers learn nothing from what experts compute."""
    return forward(dispatch, x_ND, experts_NK, weights_NK.detach(), experts)


def own_targets(sums: Callable[..., Any], balance: Any, counts: Tensor, targets: Tensor) -> Any:
    """Choices are counted in whole sequences, targets in a rank's columns."""
    total, _ = sums(balance, counts, targets)
    return total, targets


def reduced_without(axis: str, part: str) -> FunctionChange:
    """The gradients of parameters with this part in their names are not summed over an axis."""

    def change(shard: Callable[..., ParamShard], name: str, *args: Any, **named: Any) -> ParamShard:
        found = shard(name, *args, **named)
        if part not in name:
            return found
        axes = tuple(each for each in found.reduce_axes if each != axis)
        return replace(found, reduce_axes=axes)

    return change


def exchanged_loads(
    sum_loads: Callable[..., dict[str, Tensor]], loads: Mapping[str, Tensor], comm: Comm
) -> dict[str, Tensor]:
    """The first block has the load of the last one."""
    found = sum_loads(loads, comm)
    return dict(zip(found, reversed(tuple(found.values())), strict=True))


def without_last_load(
    sum_loads: Callable[..., dict[str, Tensor]], loads: Mapping[str, Tensor], comm: Comm
) -> dict[str, Tensor]:
    """The load of the last block with experts is lost."""
    found = sum_loads(loads, comm)
    return dict(list(found.items())[:-1])


def without_bias(forward: Callable[..., Any], router: Any, x: Tensor) -> Any:
    """Experts are chosen by the scores alone."""
    bias, router.bias = router.bias, None
    try:
        return forward(router, x)
    finally:
        router.bias = bias


def raw_load(forward: Callable[..., Any], mixture: Any, x: Tensor, batch: Any) -> Any:
    """The load counts only each token's first expert."""
    out = forward(mixture, x, batch)
    routing = mixture.router(mixture.region_input(x))
    load = count_experts(routing.experts[..., :1].flatten(1), mixture.router.choice.num_experts)
    return out._replace(load=load.sum(0))


def without_shared_gradient(
    forward: Callable[..., Tensor], module: Any, x: Tensor, *args: Any
) -> Tensor:
    """What a shared expert gives back to its input is lost."""
    return forward(module, x.detach(), *args)


MANY_EXPERTS = "--model.experts 8 --model.top_k 2"

MUTANTS = (
    Mutant(
        "tokens_above_twice_the_mean_of_an_expert_are_dropped",
        "a capacity that only a load out of balance reaches",
        MutantLayout("ep2", family="qwen3-moe", options=MANY_EXPERTS),
        (FunctionFault(DISPATCH, with_capacity),),
        axes=(EP_AXIS,),
        blocks=("layer*",),
    ),
    Mutant(
        "routers_learn_nothing_through_the_exchange",
        "weights of other ranks' experts are constants",
        MutantLayout("ep2 dp2", family="qwen3-moe"),
        (FunctionFault(DISPATCH, constant_weights),),
        axes=(EP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "the_balance_loss_weighs_sequences_by_targets_of_columns",
        "each rank multiplies by its own number of targets",
        MutantLayout("cp2", family="qwen3-moe"),
        (FunctionFault("weft.parallel.expert.dispatch:ShardedBalance.sums", own_targets),),
        axes=(CP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "gradients_of_routers_are_summed_over_tp_and_not_over_ep",
        "where both exist, one is forgotten",
        MutantLayout("ep2 tp2", family="qwen3-moe"),
        (FunctionFault(SHARD, reduced_without(EP_AXIS, "router.proj")),),
        axes=(EP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "gradients_of_shared_experts_are_not_summed_over_ep",
        "they are taken for experts of their rank",
        MutantLayout("dp2 ep2", family="deepseek"),
        (FunctionFault(SHARD, reduced_without(EP_AXIS, "shared")),),
        axes=(EP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "gradients_of_experts_are_not_summed_over_dp",
        "each group of expert ranks trains its own",
        MutantLayout("dp2 ep2", family="deepseek", options="--parallel.zero 1"),
        (FunctionFault(SHARD, reduced_without(DP_AXIS, "experts")),),
        axes=(DP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "routers_have_the_loads_of_other_layers",
        "biases are moved by the load of another block",
        MutantLayout("dp2", family="deepseek"),
        (FunctionFault("weft.train.step:sum_loads", exchanged_loads),),
        axes=("",),
        blocks=LAYERS,
    ),
    Mutant(
        "the_load_of_the_last_mixture_is_lost",
        "one router is never balanced",
        MutantLayout("dp2", family="deepseek"),
        (FunctionFault("weft.train.step:sum_loads", without_last_load),),
        axes=("",),
        blocks=LAYERS,
    ),
    Mutant(
        "a_later_expert_rank_chooses_without_its_bias",
        "biases are zero at first, so only later steps differ",
        MutantLayout("ep2", family="deepseek"),
        (ModuleFault("layer1.mlp.router", without_bias, axis=EP_AXIS, index=1),),
        axes=(EP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "a_tensor_rank_counts_the_first_expert_of_a_token_alone",
        "its routers' biases move apart from those of other ranks",
        MutantLayout("tp2", family="deepseek"),
        (ModuleFault("layer1.mlp", raw_load, axis=TP_AXIS, index=1),),
        axes=(TP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "a_shared_expert_returns_no_gradient_on_a_later_rank",
        "a part of the input's gradient is missing from its sum",
        MutantLayout("tp2", family="deepseek"),
        (ModuleFault("layer1.mlp.shared", without_shared_gradient, axis=TP_AXIS, index=1),),
        axes=(TP_AXIS,),
        blocks=LAYERS,
    ),
)
