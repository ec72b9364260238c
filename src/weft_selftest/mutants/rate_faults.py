"""Mutants of rates and rules: decay of the learning rate, groups, second moments, sums of losses in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.parallel.pp import AXIS as PP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.changes import named_argument
from weft_selftest.mutants.fault import FunctionChange, FunctionFault, Mutant, MutantLayout

LEARNING_RATE = "weft.train.build:learning_rate"
ELEMENTWISE = "weft.train.optimizers.elementwise"
OPTIMIZER = "weft.train.optim:NamedOptimizer"
PARAMETERS = ("embed", "layer*", "head")
ANY_AXIS = ("",)
SHORT_WARMUP = "--optim.warmup 1"
BFLOAT16 = "--precision.compute bfloat16"


def rate_of(**changes: Any) -> FunctionChange:
    """The rate of a run with other values of some keys."""

    def change(rate: Callable[..., float], step: int, *, optim: Any, total_steps: int) -> float:
        return rate(step, optim.model_copy(update=changes), total_steps)

    return change


def half_of_the_run(
    rate: Callable[..., float], step: int, *, optim: Any, total_steps: int
) -> float:
    """The decay ends in the middle of the run."""
    return rate(step, optim, max(total_steps // 2, 1))


def scaled_decay(
    update: Callable[..., None], optimizer: Any, group: Any, settings: dict[str, float], skip: Any
) -> None:
    """The factor of a group's rate counts for its decay again."""
    decay = settings["weight_decay"] * group.settings.lr_scale
    update(optimizer, group, {**settings, "weight_decay": decay}, skip)


def doubled_parameter_sum(
    update: Callable[..., Generator[Any, Any, None]], rule: Any, *args: Any, **named: Any
) -> Generator[Any, Any, None]:
    """The mean square of a parameter is that of its sum over ranks by the size of a shard."""
    rounds = update(rule, *args, **named)
    sums = next(rounds)
    try:
        parameter, *others = yield sums
        sums = rounds.send([parameter * 2, *others])
        while True:
            sums = rounds.send((yield sums))
    except StopIteration:
        return


def same_epsilon(
    adamw: Callable[..., None], params: Any, grads: Any, *args: Any, **named: Any
) -> None:
    """The second moment has no correction of its bias: it is too small in the first steps."""
    _, squares, _, steps = args[:4]
    beta2 = named["beta2"]
    for square, step in zip(squares, steps, strict=True):
        square.mul_(1 - beta2 ** float(step + 1))
    adamw(params, grads, *args, **named)


def in_logits_type(
    losses_of: Callable[..., Tensor], logits: Tensor, *args: Any, **named: Any
) -> Tensor:
    """Losses have the type of logits, and so has their sum."""
    return losses_of(logits, *args, **named).to(logits.dtype)


def added_in_16_bits(play: Callable[..., Any], player: Any, *args: Any, **named: Any) -> Any:
    """The losses of micro-batches are added in the type of activations."""
    found = play(player, *args, **named)
    dtype = getattr(torch, player.model.plan.compute)
    return replace(found, loss=found.loss.to(dtype).double())


def momentum_of_rounded(
    direction: Callable[..., Tensor], rule: Any, grad: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """The momentum of matrices is kept in bfloat16."""
    found = direction(rule, grad, state)
    momentum = state["momentum_buffer"]
    momentum.copy_(momentum.to(torch.bfloat16))
    return found


MUTANTS = (
    Mutant(
        "wsd_decays_from_the_end_of_the_warm_up",
        "there is no plateau",
        MutantLayout("dp2", options=f"--optim.decay wsd {SHORT_WARMUP}"),
        (FunctionFault(LEARNING_RATE, rate_of(decay="linear")),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "the_plateau_never_ends",
        "a rate that stays where it should fall",
        MutantLayout("dp2", options=f"--optim.decay wsd --optim.cooldown 0.6 {SHORT_WARMUP}"),
        (FunctionFault(LEARNING_RATE, rate_of(decay="constant")),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "a_cosine_falls_to_zero",
        "the smallest rate is ignored",
        MutantLayout("dp2", options=f"--optim.decay cosine --optim.min_lr 1 {SHORT_WARMUP}"),
        (FunctionFault(LEARNING_RATE, rate_of(min_lr=0.0)),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "the_rate_reaches_its_end_in_the_middle_of_the_run",
        "half of the steps train at the smallest rate",
        MutantLayout("pp2", options=f"--optim.decay linear {SHORT_WARMUP}"),
        (FunctionFault(LEARNING_RATE, half_of_the_run),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "the_decay_of_a_group_is_scaled_with_its_rate_again",
        "weights of slow groups hardly decay",
        MutantLayout("dp2", options="--optim.groups '*norm*: lr_scale=0.1' '*: lr_scale=2'"),
        (FunctionFault(f"{OPTIMIZER}._update", scaled_decay),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "sgd_looks_ahead",
        "Nesterov's momentum in place of the plain one",
        MutantLayout("dp2", options="--optim.name sgd --optim.lr 0.5"),
        (FunctionFault(f"{ELEMENTWISE}:sgd", named_argument("nesterov", True)),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_second_moment_shrinks_in_every_step",
        "its bias is corrected twice",
        MutantLayout("dp2", options="--parallel.zero 2"),
        (FunctionFault(f"{ELEMENTWISE}:adamw", same_epsilon),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_mean_square_of_a_parameter_is_that_of_a_shard",
        "a sum over ranks is divided by the entries of one",
        MutantLayout("tp2", options="--optim.name adafactor"),
        (
            FunctionFault(
                "weft.train.optimizers.adafactor:Adafactor.update_with_sums", doubled_parameter_sum
            ),
        ),
        axes=(TP_AXIS, ""),
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_momentum_of_matrices_is_rounded",
        "an average that forgets small gradients",
        MutantLayout("dp2", options="--optim.name muon"),
        (FunctionFault("weft.train.optimizers.muon:Muon.direction", momentum_of_rounded),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "losses_of_a_sharded_vocabulary_are_added_in_16_bits",
        "visible only where logits have 16 bits",
        MutantLayout("tp2", options=BFLOAT16),
        (FunctionFault("weft.parallel.tensor.vocab:vocab_token_losses", in_logits_type),),
        axes=(TP_AXIS, ""),
        blocks=("loss", ""),
    ),
    Mutant(
        "losses_of_micro_batches_are_added_in_16_bits",
        "the log is off by what bfloat16 loses, and only where activations have it",
        MutantLayout("pp2", options=BFLOAT16),
        (FunctionFault("weft.parallel.pipeline.player:Player.play", added_in_16_bits),),
        axes=(PP_AXIS, ""),
        blocks=("loss", ""),
    ),
)
