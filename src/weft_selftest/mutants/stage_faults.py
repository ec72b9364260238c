"""Mutants of stages: split backwards, shared and tied weights, messages, recomputation, more micro-batches than two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.models.common.batch import Batch
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.pipeline.player import Player
from weft.parallel.pp import AXIS as PP_AXIS
from weft.parallel.recompute.blocks import RecomputedBlock
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import named_argument
from weft_selftest.mutants.data_faults import Calls
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout
from weft_selftest.mutants.tensor_faults import other_random_state

AXIS = (PP_AXIS,)
ANY_AXIS = ("",)
PLAYER = "weft.parallel.pipeline.player:Player"
PARAMETERS = ("embed", "layer*", "head")


def detached_weight(proxy: Callable[..., Tensor], split: Any, tensor: Tensor) -> Tensor:
    """A weight outside of products has no gradient."""
    return proxy(split, tensor).detach() if id(tensor) in split._weights else tensor


def weighed_alike(backward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
    """Each micro-batch counts as much as the others, however many targets it has."""
    counts = [batch.num_targets().double() for batch in state.batches]
    mean = torch.stack(counts).mean()
    seed = state.seed
    state.seed = seed * mean / counts[act.mb].clamp(min=1)
    backward(player, state, act)
    state.seed = seed


def two_slots(forward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
    """A slot that every other micro-batch shares holds the batch of the first to take it."""
    batches = state.batches
    state.batches = [batches[number % 2] for number in range(len(batches))]
    forward(player, state, act)
    state.batches = batches


def last_two(backward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
    """The gradients of all micro-batches but two are lost."""
    seed = state.seed
    if act.mb < len(state.batches) - 2:
        state.seed = seed * 0
    backward(player, state, act)
    state.seed = seed


def last_use_of_shared(backward: Callable[..., None], player: Player, state: Any, act: Any) -> None:
    """The stage that embeds overwrites what the head of the same rank has left."""
    for param in player._params[act.stage]:
        stages = [
            stage for stage, params in player._params.items() if any(param is p for p in params)
        ]
        if act.stage == 0 and len(stages) > 1 and param.grad is not None:
            param.grad.zero_()
    backward(player, state, act)


def forgotten_documents(
    forward: Callable[..., Any], block: RecomputedBlock, x: Tensor, batch: Batch
) -> Any:
    """A recomputed forward attends across documents."""
    inner = block.block
    calls: list[bool] = []

    def call(x: Tensor, batch: Batch) -> Any:
        if calls:
            one = None if batch.documents is None else torch.zeros_like(batch.documents)
            batch = replace(batch, documents=one)
        calls.append(True)
        return inner(x, batch)

    return forward(RecomputedBlock(Calls(call), block.mode), x, batch)


MUTANTS = (
    Mutant(
        "norms_learn_nothing_from_a_split_backward",
        "only products leave weight gradients for the second part",
        MutantLayout("pp2", options="--pipeline.schedule zero_bubble"),
        (
            FunctionFault(
                "weft.parallel.autograd.split_backward:SplitBackward._proxy", detached_weight
            ),
        ),
        axes=(PP_AXIS, ""),
        blocks=PARAMETERS,
    ),
    Mutant(
        "micro_batches_of_a_pipeline_are_weighed_alike",
        "those with few targets count as much as those with many",
        MutantLayout("pp2", documents=True),
        (FunctionFault(f"{PLAYER}._backward", weighed_alike),),
        axes=(PP_AXIS, ""),
        blocks=("loss", *PARAMETERS),
    ),
    Mutant(
        "activations_are_rounded_on_their_way",
        "messages between stages lose 16 bits",
        MutantLayout("pp2 dp2"),
        (CollectiveFault("Player._send", "bfloat16"),),
        axes=AXIS,
        blocks=("layer*", "head"),
    ),
    Mutant(
        "a_later_micro_batch_reads_the_slot_of_an_earlier_one",
        "there are slots for two batches, and more are under way",
        MutantLayout("pp2"),
        (FunctionFault(f"{PLAYER}._forward", two_slots),),
        axes=(PP_AXIS, ""),
        blocks=("embed", "layer*", "loss", "head"),
    ),
    Mutant(
        "only_the_last_two_micro_batches_leave_gradients",
        "a sum of two buffers, used in turn",
        MutantLayout("dp2", options="--batch.global_size 8"),
        (FunctionFault(f"{PLAYER}._backward", last_two),),
        axes=ANY_AXIS,
        blocks=("loss", *PARAMETERS),
    ),
    Mutant(
        "a_weight_that_two_stages_of_a_rank_share_has_its_last_gradient",
        "embedding and head lie on one rank, and the one overwrites the other",
        MutantLayout("pp2", family="gpt2", options="--pipeline.schedule zbv"),
        (FunctionFault(f"{PLAYER}._backward", last_use_of_shared),),
        axes=(PP_AXIS, ""),
        blocks=("embed", "head"),
    ),
    Mutant(
        "a_tied_gradient_is_rounded_on_its_way",
        "the sum over stages loses 16 bits",
        MutantLayout("pp2 tp2", family="gpt2"),
        (CollectiveFault("sum_tied_gradients", "bfloat16"),),
        axes=AXIS,
        blocks=("embed",),
    ),
    Mutant(
        "a_copy_of_a_tied_parameter_has_the_rate_of_its_own_name",
        "patterns of groups match the name of the copy, and both drift apart",
        MutantLayout("pp2", family="gpt2", options="--optim.groups '*embed*: lr_scale=0.1'"),
        (FunctionFault("weft.train.optim:group_names", named_argument("owners", {})),),
        axes=(PP_AXIS, ""),
        blocks=("embed", "head"),
    ),
    Mutant(
        "stages_start_from_random_states_of_their_own",
        "initial values are those of no layout with other stages",
        MutantLayout("pp2"),
        (FunctionFault("weft.train.build:materialize_params", other_random_state(PP_AXIS)),),
        axes=(PP_AXIS, ""),
        blocks=("layer*", "head"),
        reference=references.PYTORCH_RANDOM_STATE,
    ),
    Mutant(
        "a_recomputed_forward_forgets_documents",
        "the backward is of another function than the forward",
        MutantLayout("dp2", options="--parallel.recompute full", documents=True),
        (
            FunctionFault(
                "weft.parallel.recompute.blocks:RecomputedBlock.forward", forgotten_documents
            ),
        ),
        axes=(DP_AXIS, ""),
        blocks=("layer*",),
    ),
)
