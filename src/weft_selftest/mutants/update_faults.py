"""Mutants of the optimizer step: learning rate, weight decay, moments, what is updated, and number types."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.parallel.dp import AXIS as DP_AXIS
from weft.train.step import TrainStep
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import named_argument, nothing, rounded_to_bfloat16
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout

DP = MutantLayout("dp2")
UPDATE = "weft.train.step:TrainStep.update"
POLICY = "weft.parallel.zero.grouping:sharding_policy"
BFLOAT16 = MutantLayout("dp2", options="--precision.compute bfloat16")
FLOAT16 = MutantLayout("dp2", options="--precision.compute float16")
PARAMETERS = ("embed", "layer*", "head")
ANY_AXIS = ("",)


@dataclass
class PreviousRate:
    """Each update uses the learning rate of the step before."""

    rates: dict[int, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, update: Callable[..., None], step: TrainStep, lr: float) -> None:
        with self.lock:
            before = self.rates.get(id(step), lr)
            self.rates[id(step)] = lr
        update(step, before)


def without_one_rank(update: Callable[..., None], step: TrainStep, lr: float) -> None:
    """The second data rank is not updated."""
    if step.model.comm.index(DP_AXIS) != 1:
        update(step, lr)


def updated_twice(update: Callable[..., None], step: TrainStep, lr: float) -> None:
    """Two updates by one gradient."""
    update(step, lr)
    update(step, lr)


def fresh_moments(update: Callable[..., None], step: TrainStep, lr: float) -> None:
    """Moments are zeros before every update."""
    for state in step.state().optimizer_state.values():
        for key, tensor in state.items():
            if key != "step":
                tensor.zero_()
    update(step, lr)


def step_numbers_from_one(update: Callable[..., None], step: TrainStep, lr: float) -> None:
    """The bias correction is that of the first step."""
    for state in step.state().optimizer_state.values():
        if "step" in state:
            state["step"].zero_()
    update(step, lr)


def decayed_frozen_parameters(update: Callable[..., None], step: TrainStep, lr: float) -> None:
    """Frozen parameters decay."""
    update(step, lr)
    with torch.no_grad():
        for name in step.model.frozen:
            step.model.params[name].mul_(1 - 0.1 * lr)


def every_name(matrices: Callable[..., Any], params: Mapping[str, Tensor]) -> frozenset[str]:
    """Norms decay, too."""
    return frozenset(params)


def decay_by_shape_of_shards(
    make: Callable[..., Any], params: Any, optim: Any, *, decay_names: Any = None
) -> Any:
    """Which parameters decay is decided by the shape of their shards, which have one dim."""
    names = frozenset(name for name, shard in params.items() if shard.ndim >= 2)
    return make(params, optim, decay_names=names)


def compute_dtype_for(name: str) -> Callable[..., Any]:
    """A dtype of the policy is that of compute."""

    def change(policy_of: Callable[..., Any], plan: Any) -> Any:
        policy = policy_of(plan)
        return replace(policy, **{name: policy.compute})

    return change


MUTANTS = (
    Mutant(
        "updates_use_the_learning_rate_of_the_step_before",
        "the schedule is one step late",
        DP,
        (FunctionFault(UPDATE, PreviousRate()),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "one_data_rank_is_never_updated",
        "replicas drift apart",
        MutantLayout("dp2 tp2"),
        (FunctionFault(UPDATE, without_one_rank),),
        axes=(DP_AXIS,),
        blocks=PARAMETERS,
        reference=references.PICOTRON,
    ),
    Mutant(
        "parameters_are_never_updated",
        "no update at all",
        DP,
        (FunctionFault(UPDATE, nothing),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "parameters_are_updated_twice",
        "two steps by one gradient",
        DP,
        (FunctionFault(UPDATE, updated_twice),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "moments_are_lost_every_step",
        "AdamW without memory",
        DP,
        (FunctionFault(UPDATE, fresh_moments),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "momentum_is_lost_every_step",
        "SGD without momentum",
        MutantLayout("dp2", options="--optim.name sgd --optim.lr 0.5"),
        (FunctionFault(UPDATE, fresh_moments),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_bias_correction_is_that_of_the_first_step",
        "the step number of the optimizer does not advance",
        DP,
        (FunctionFault(UPDATE, step_numbers_from_one),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "norms_decay",
        "weight decay of the wrong group",
        DP,
        (FunctionFault("weft.train.build:matrices", every_name),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "no_weight_decay_under_zero",
        "shards have one dim, and vectors do not decay",
        MutantLayout("dp2", options="--parallel.zero 1"),
        (FunctionFault("weft.train.build:make_optimizer", decay_by_shape_of_shards),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "gradients_are_not_clipped",
        "the norm is logged and not used",
        DP,
        (FunctionFault("weft.parallel.zero.grad_norm:clip", nothing),),
        axes=ANY_AXIS,
        blocks=("", *PARAMETERS),
    ),
    Mutant(
        "the_norm_is_summed_in_bfloat16",
        "clip factors are 0.4% off",
        DP,
        (FunctionFault("weft.parallel.zero.grad_norm:squared_norm", rounded_to_bfloat16),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "frozen_parameters_decay",
        "the base of adapters moves",
        MutantLayout("dp2", options="--lora.rank 3"),
        (FunctionFault(UPDATE, decayed_frozen_parameters),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "bfloat16_parameters_are_never_refreshed",
        "the optimizer updates float32 values that the model never reads",
        BFLOAT16,
        (
            FunctionFault(
                "weft.parallel.zero.gradient_reducer:GradientReducer.after_optimizer_step", nothing
            ),
        ),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "float16_gradients_are_not_divided_by_the_loss_scale",
        "65,536 times too large, hidden by AdamW",
        FLOAT16,
        (FunctionFault("weft.parallel.zero.grad_norm:clip", named_argument("scale", 1.0)),),
        axes=ANY_AXIS,
        blocks=("", *PARAMETERS),
    ),
    Mutant(
        "the_optimizer_updates_bfloat16_values",
        "small updates are rounded away",
        BFLOAT16,
        (FunctionFault(POLICY, compute_dtype_for("params")),),
        axes=ANY_AXIS,
        blocks=("", *PARAMETERS),
    ),
    Mutant(
        "gradients_are_accumulated_in_bfloat16",
        "sums over micro-batches lose 16 bits",
        MutantLayout("dp2", options="--precision.compute bfloat16 --batch.global_size 32"),
        (FunctionFault(POLICY, compute_dtype_for("reduce")),),
        axes=ANY_AXIS,
        blocks=("", *PARAMETERS),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "float32_gradients_are_reduced_in_bfloat16",
        "sums over ranks lose 16 bits of a float32 run",
        MutantLayout("dp2", options="--precision.compute float32"),
        (CollectiveFault("ParamGroup._start_collective", "bfloat16"),),
        axes=(DP_AXIS,),
        blocks=("head",),
    ),
)
