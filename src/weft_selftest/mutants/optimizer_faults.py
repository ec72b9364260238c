"""Mutants of update rules: a formula, the exchange of whole matrices, sums over shards, groups and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from weft.parallel.dp import AXIS as DP
from weft.parallel.tp import AXIS as TP_AXIS
from weft.parallel.zero.state_codes import SIGNED, UNSIGNED
from weft_selftest.mutants.changes import named_argument
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault, Mutant, MutantLayout

ELEMENTWISE = "weft.train.optimizers.elementwise"
ADAMW = f"{ELEMENTWISE}:adamw"
LION = f"{ELEMENTWISE}:Lion.update"
MUON = "weft.train.optimizers.muon:Muon"
ADAFACTOR = "weft.train.optimizers.adafactor:Adafactor"
GROUPS = "weft.train.optimizers.groups"
PARAMETERS = ("embed", "layer*", "head")
ANY_AXIS = ("",)
OF_LION = MutantLayout("dp2", options="--optim.name lion")
OF_MUON = MutantLayout("tp2", options="--optim.name muon")
OF_ADAFACTOR = MutantLayout("tp2", options="--optim.name adafactor")
CODES = "weft.train.optimizers.states_in_8_bits:StatesIn8Bits"
BLOCKS = "weft.parallel.zero.state_codes:StateBlocks"
JOIN_CUT_BLOCKS = "weft.train.optimizers.states_in_8_bits:join_cut_blocks"
IN_8_BITS = MutantLayout("tp2", options="--optim.state_dtype 8bit --optim.state_block 24")
GROUPED = MutantLayout("dp2", options="--optim.groups '*norm*: lr_scale=0.1' '*: lr_scale=2'")


def coupled_decay(
    adamw: Callable[..., None], params: list[Tensor], grads: list[Tensor], *args: Any, **named: Any
) -> None:
    """The decay is added to the gradient, as in Adam."""
    decay = named.pop("weight_decay")
    coupled = []
    for param, grad in zip(params, grads, strict=True):
        coupled.append(grad + decay * param)
    adamw(params, coupled, *args, weight_decay=0.0, **named)


def swapped_betas(update: Callable[..., None], rule: Any, *args: Any, **named: Any) -> None:
    """Each decay rate is used in place of the other one."""
    betas = rule.betas
    other = type(rule)(betas=(betas[1], betas[0]))
    update(other, *args, **named)


def momentum_first(
    update: Callable[..., None],
    rule: Any,
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    **named: Any,
) -> None:
    """The momentum has this gradient before its sign is taken."""
    state["exp_avg"].mul_(rule.betas[1]).add_(grad, alpha=1 - rule.betas[1])
    kept = state["exp_avg"].clone()
    update(rule, param, grad, state, **named)
    state["exp_avg"].copy_(kept)


def transposed_shape(factor: Callable[..., float], rule: Any, shape: tuple[int, int]) -> float:
    """Rows count as columns."""
    return factor(rule, (shape[1], shape[0]))


def without_nesterov(direction: Callable[..., Tensor], rule: Any, grad: Tensor, state: Any) -> Any:
    """The direction is the momentum alone."""
    direction(rule, grad, state)
    return state["momentum_buffer"].clone()


def local_matrices(
    exchange: Callable[..., Tensor], matrices: Any, flat: Tensor, sent: Any, received: Any
) -> Tensor:
    """Pieces of other ranks never arrive: they are zeros."""
    result = exchange(matrices, flat, sent, received)
    start = 0
    for rank, pieces in enumerate(received):
        stop = start + sum(held.piece.size for held in pieces)
        if rank != matrices.index:
            result[start:stop] = 0
        start = stop
    return result


def local_sums(
    add: Callable[..., Any], optimizer: Any, axes: Any, sums: Sequence[Sequence[Tensor]]
) -> Any:
    """Each rank has the sums of its own entries."""
    add(optimizer, axes, sums)
    return sums


def without_relative_step(update: Callable[..., Any], rule: Any, *args: Any, **named: Any) -> Any:
    """Steps are never below the smallest scale times a thousand."""
    other = type(rule)(beta2_decay=rule.beta2_decay, eps=(rule.eps[0], 1.0), d=rule.d)
    yield from update(other, *args, **named)


def largest_of_next_block(absmax: Callable[..., Tensor], blocks: Any, values: Tensor) -> Tensor:
    """Each block has the scale of the one after it."""
    return absmax(blocks, values).roll(-1)


def largest_of_own_entries(join: Callable[..., None], *states: Any, **options: Any) -> None:
    """A block that a shard cuts has a scale of each rank's own."""


def signed_codes(fresh: Callable[..., Any], codes: Any, name: str, param: Tensor) -> Any:
    """The second moment has codes of the map of the first."""
    state = fresh(codes, name, param)
    return {key: x.to(SIGNED) if x.dtype == UNSIGNED else x for key, x in state.items()}


def last_group(group_of: Callable[..., int | None], name: str, groups: tuple[Any, ...]) -> Any:
    """The last pattern that matches applies."""
    found = group_of(name, groups[::-1])
    return None if found is None else len(groups) - 1 - found


def unscaled_rate(settings_of: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Groups do not scale the learning rate."""
    return replace(settings_of(*args, **named), lr_scale=1.0)


def late_rate(rate: Callable[..., float], step: int, *args: Any, **named: Any) -> float:
    """The schedule begins one step late."""
    return rate(max(step - 1, 0), *args, **named)


MUTANTS = (
    Mutant(
        "adamw_adds_another_epsilon",
        "updates of small gradients are too small",
        MutantLayout("dp2"),
        (FunctionFault(ADAMW, named_argument("eps", 1e-3)),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "adamw_adds_the_decay_to_the_gradient",
        "Adam with L2 in place of decoupled decay",
        MutantLayout("dp2"),
        (FunctionFault(ADAMW, coupled_decay),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "lion_swaps_its_decay_rates",
        "the rates of direction and momentum are exchanged, on one device, too",
        OF_LION,
        (FunctionFault(LION, swapped_betas),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "lion_updates_its_momentum_before_the_sign",
        "the gradient counts twice in the direction",
        OF_LION,
        (FunctionFault(LION, momentum_first),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "muon_scales_by_the_transposed_shape",
        "wide matrices get the rate of tall ones, on one device, too",
        OF_MUON,
        (FunctionFault(f"{MUON}.lr_factor", transposed_shape),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "muon_forgets_nesterov",
        "the direction is the momentum",
        OF_MUON,
        (FunctionFault(f"{MUON}.direction", without_nesterov),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "muon_orthogonalises_the_pieces_of_one_rank",
        "entries of other ranks never reach the owner of a matrix",
        OF_MUON,
        (
            FunctionFault(
                "weft.parallel.zero.matrix_shards:MatrixExchange._exchange", local_matrices
            ),
        ),
        axes=(TP_AXIS,),
        blocks=PARAMETERS,
    ),
    Mutant(
        "muon_returns_the_pieces_of_another_rank",
        "results are exchanged in reverse order",
        MutantLayout("dp2", options="--optim.name muon --parallel.zero 2"),
        (CollectiveFault("MatrixExchange._exchange", "reverse"),),
        axes=(DP,),
        blocks=PARAMETERS,
    ),
    Mutant(
        "sums_of_rows_and_columns_stay_on_their_rank",
        "the second moment of a sharded matrix is that of its shard",
        OF_ADAFACTOR,
        (FunctionFault("weft.train.optim:NamedOptimizer._add_sums", local_sums),),
        axes=(TP_AXIS,),
        blocks=PARAMETERS,
    ),
    Mutant(
        "adafactor_scales_by_a_constant",
        "the root mean square of a parameter does not scale its step",
        OF_ADAFACTOR,
        (FunctionFault(f"{ADAFACTOR}.update_with_sums", without_relative_step),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "states_in_8_bits_have_the_scale_of_the_next_block",
        "moments are too large or too small, on one device, too",
        IN_8_BITS,
        (FunctionFault(f"{BLOCKS}.absmax", largest_of_next_block),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "blocks_that_shards_cut_have_a_scale_of_each_rank",
        "moments are rounded to other values than on one device",
        IN_8_BITS,
        (FunctionFault(JOIN_CUT_BLOCKS, largest_of_own_entries),),
        axes=(TP_AXIS,),
        blocks=PARAMETERS,
    ),
    Mutant(
        "second_moments_have_signed_codes",
        "half of the codes are never used, and small moments become 0",
        IN_8_BITS,
        (FunctionFault(f"{CODES}.fresh", signed_codes),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_last_group_that_matches_applies",
        "a wide pattern overrides a narrow one",
        GROUPED,
        (FunctionFault(f"{GROUPS}:group_of", last_group),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "groups_do_not_scale_the_learning_rate",
        "every parameter has the rate of the run",
        GROUPED,
        (FunctionFault(f"{GROUPS}:_settings", unscaled_rate),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_warm_up_ends_one_step_late",
        "the rate of every step is that of the one before",
        MutantLayout("dp2", options="--optim.warmup 2"),
        (FunctionFault("weft.train.build:learning_rate", late_rate),),
        axes=ANY_AXIS,
        blocks=("",),
        steps=4,
    ),
)
