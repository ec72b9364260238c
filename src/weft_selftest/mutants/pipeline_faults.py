"""Mutants of pipeline parallelism: messages, micro-batches, ties across stages, split backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.models.common.batch import Batch, Chained
from weft.parallel.pipeline.player import Player
from weft.parallel.pp import AXIS as PP_AXIS
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import input_itself, nothing
from weft_selftest.mutants.fault import (
    CollectiveFault,
    FunctionFault,
    ModuleFault,
    Mutant,
    MutantLayout,
)

PP = MutantLayout("pp2")
PP_GPT2 = MutantLayout("pp2", family="gpt2")
AXIS = (PP_AXIS,)
BACKWARD = "weft.parallel.pipeline.player:Player._backward"
CHAIN = "weft.parallel.pipeline.player:chain"
SECOND_STAGE = ("layer2",)


def drop_microbatch(backward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
    """The gradients of micro-batch 1 are zeros."""
    seed = state.seed
    if act.mb == 1:
        state.seed = seed * 0
    backward(player, state, act)
    state.seed = seed


def zero_positions(forward: Callable[..., Any], rope: Any, positions: Tensor) -> Any:
    """All tokens are at position 0."""
    return forward(rope, torch.zeros_like(positions))


@dataclass
class TargetsOfTheMicrobatchBefore:
    """The loss reads the targets of its last call."""

    targets: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self, forward: Callable[..., Tensor], loss: Any, logits: Tensor, batch: Batch
    ) -> Tensor:
        before = self.targets.get(id(loss), batch.targets)
        self.targets[id(loss)] = batch.targets
        return forward(loss, logits, replace(batch, targets=before))


def lost_weight_gradients(
    backward: Callable[..., None], player: Player, state: Any, act: Any
) -> None:
    """The weight gradients of micro-batch 1 are never computed."""
    if act.mb != 1:
        backward(player, state, act)
        return
    player._notify_last_backward(act)
    state.pending_wgrads.pop((act.stage, act.mb))


def doubled_split_backward(
    backward: Callable[..., None], player: Player, state: Any, act: Any
) -> None:
    """The weight gradients of the last stage count twice."""
    backward(player, state, act)
    for name, block in player.model.stages[act.stage].items():
        if name == "head" and act.mb == 0:
            for param in block.parameters():
                if param.grad is not None:
                    param.grad.mul_(2)


def ties_added_once(sum_ties: Callable[..., None], model: Any, reducer: Any) -> None:
    """Only the owner of a tied parameter receives the other gradient."""
    before = {
        tie.name: reducer.sharded_params[tie.name].grad.clone()
        for tie in model.cross_stage_ties
        if not tie.is_owner and tie.name in reducer.sharded_params
    }
    sum_ties(model, reducer)
    for name, gradient in before.items():
        reducer.sharded_params[name].grad.copy_(gradient)


def without_extra_losses(run: Callable[..., Chained], *args: Any) -> Chained:
    """Losses of blocks before the last one are lost."""
    return run(*args)._replace(loss=None)


def extra_losses_times(factor: float) -> Callable[..., Chained]:
    """Losses of blocks before the last one are scaled."""

    def change(run: Callable[..., Chained], *args: Any) -> Chained:
        out = run(*args)
        if out.loss is None:
            return out
        return out._replace(loss=out.loss * factor)

    return change


def own_scaling_lost(forward: Callable[..., Any], module: Any, positions: Tensor) -> Any:
    """Angles without the scaling of long contexts."""
    scaling = module.scaling
    module.scaling = None
    try:
        return forward(module, positions)
    finally:
        module.scaling = scaling


def run_twice(forward: Callable[..., Tensor], layer: Any, x: Tensor, batch: Any) -> Tensor:
    """The layer runs on its own output."""
    return forward(layer, forward(layer, x, batch), batch)


def input_times(factor: float) -> Callable[..., None]:
    """The gradient that goes to the stage before is scaled."""

    def change(backward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
        backward(player, state, act)
        if act.stage > 0:
            state.outputs[act] = state.outputs[act] * factor

    return change


MUTANTS = (
    Mutant(
        "tied_embeddings_are_not_summed_across_stages",
        "embedding and head drift apart",
        MutantLayout("pp2 dp2", family="gpt2"),
        (FunctionFault("weft.parallel.zero.grad_norm:sum_tied_gradients", nothing),),
        axes=AXIS,
        blocks=("embed", "head"),
        reference=references.MEGATRON_TIES,
    ),
    Mutant(
        "only_the_owner_of_a_tied_parameter_gets_the_sum",
        "the message is sent one way",
        PP_GPT2,
        (FunctionFault("weft.parallel.zero.grad_norm:sum_tied_gradients", ties_added_once),),
        axes=AXIS,
        blocks=("embed", "head"),
        reference=references.MEGATRON_TIED_SHARDS,
    ),
    Mutant(
        "the_last_micro_batch_is_dropped",
        "its gradients are zeros",
        MutantLayout("pp2", options="--batch.global_size 2"),
        (FunctionFault(BACKWARD, drop_microbatch),),
        axes=("",),
        blocks=("loss", "head"),
        reference=references.AUTOMODEL_LOST_MICROBATCHES,
    ),
    Mutant(
        "later_stages_have_no_rotary_positions",
        "their tokens are all at position 0",
        MutantLayout("pp2 tp2"),
        (ModuleFault("layer2.attn.rope", zero_positions, axis=PP_AXIS),),
        axes=AXIS,
        blocks=("layer2",),
        reference=references.SCALETORCH,
    ),
    Mutant(
        "the_last_stage_reads_the_targets_of_the_micro_batch_before",
        "micro-batches are off by one",
        PP,
        (ModuleFault("loss", TargetsOfTheMicrobatchBefore(), axis=PP_AXIS),),
        axes=AXIS,
        blocks=("loss",),
    ),
    Mutant(
        "a_stage_receives_the_activation_of_the_micro_batch_before",
        "the buffer of a receive is read too early",
        PP,
        (CollectiveFault("Player._recv", "stale", op="recv", place=1),),
        axes=AXIS,
        blocks=SECOND_STAGE,
    ),
    Mutant(
        "the_gradient_of_an_activation_is_scaled_on_its_way",
        "the first stage learns twice as fast",
        PP,
        (FunctionFault(BACKWARD, input_times(2.0)),),
        axes=AXIS,
        blocks=("layer1", "layer2"),
    ),
    Mutant(
        "the_gradients_for_the_first_stage_are_lost",
        "a message of zeros",
        PP,
        (FunctionFault(BACKWARD, input_times(0.0)),),
        axes=AXIS,
        blocks=("layer1", "layer2"),
    ),
    Mutant(
        "a_layer_is_lost_where_layers_do_not_divide",
        "30 layers became 28",
        PP,
        (ModuleFault("layer1", input_itself, axis=PP_AXIS),),
        axes=AXIS,
        blocks=("layer1",),
        reference=references.MEGATRON_LOST_LAYERS,
    ),
    Mutant(
        "a_layer_runs_twice",
        "both stages hold it",
        PP,
        (ModuleFault("layer1", run_twice, axis=PP_AXIS),),
        axes=AXIS,
        blocks=("layer1",),
    ),
    Mutant(
        "weight_gradients_of_a_split_backward_are_lost",
        "the second part of one backward does not run",
        MutantLayout("pp2", options="--pipeline.schedule zero_bubble"),
        (
            FunctionFault(
                "weft.parallel.pipeline.player:Player._backward_weights", lost_weight_gradients
            ),
        ),
        axes=(PP_AXIS, ""),
        blocks=("head", "layer*"),
    ),
    Mutant(
        "weight_gradients_of_a_split_backward_count_twice",
        "the second part of the backward adds them again",
        MutantLayout("pp2", options="--pipeline.schedule zero_bubble"),
        (
            FunctionFault(
                "weft.parallel.pipeline.player:Player._backward_weights", doubled_split_backward
            ),
        ),
        axes=(PP_AXIS, ""),
        blocks=("head",),
        reference=references.PYTORCH_SPLIT_BACKWARD,
    ),
    Mutant(
        "losses_of_earlier_stages_are_never_added",
        "balance losses and multi-token prediction have no effect",
        MutantLayout("pp2", family="deepseek"),
        (FunctionFault(CHAIN, without_extra_losses),),
        axes=("",),
        blocks=("mtp0", "layer1", "layer2", "loss", ""),
        reference=references.SCALETORCH,
    ),
    Mutant(
        "losses_of_earlier_stages_are_scaled_by_the_number_of_stages",
        "they count pp times",
        MutantLayout("pp2", family="deepseek"),
        (FunctionFault(CHAIN, extra_losses_times(2.0)),),
        axes=("",),
        blocks=("mtp0", "layer1", "layer2", "loss", ""),
    ),
    Mutant(
        "yarn_is_lost_on_a_later_stage",
        "one stage rotates by unscaled angles",
        MutantLayout(
            "pp2",
            family="deepseek",
            options="--model.rope_scaling_factor 4 --model.rope_scaling_original_context 8",
        ),
        (ModuleFault("layer2.attn.rope", own_scaling_lost, axis=PP_AXIS),),
        axes=AXIS,
        blocks=("layer2",),
        reference=references.MEGATRON_COMPOSITION,
    ),
)
