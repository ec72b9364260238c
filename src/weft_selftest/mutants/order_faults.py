"""Mutants of deterministic runs: gradients that are added in a fixed tree over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.parallel.dp import AXIS as DP_AXIS
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

FIXED_ORDER = "--deterministic True"
ADD = "weft.parallel.zero.fixed_order:TreeSum.add"
ANY_AXIS = ("",)


def without_second_leaf(add: Callable[..., None], tree: Any, leaf: Any, x: Tensor) -> None:
    """The gradient of micro-batch 1 is zero."""
    add(tree, leaf, x.zero_() if leaf.microbatch == 1 else x)


def doubled_second_leaf(add: Callable[..., None], tree: Any, leaf: Any, x: Tensor) -> None:
    """The gradient of micro-batch 1 counts twice."""
    add(tree, leaf, x.mul_(2) if leaf.microbatch == 1 else x)


def without_last_row(tree_sum: Callable[..., Tensor], rows: Tensor, dim: int) -> Tensor:
    """The last rank's term is lost."""
    length = rows.shape[dim]
    return tree_sum(rows.narrow(dim, 0, max(length - 1, 1)), dim)


MUTANTS = (
    Mutant(
        "a_leaf_of_the_fixed_order_is_lost",
        "deterministic sums leave out a micro-batch",
        MutantLayout("dp2", options=f"{FIXED_ORDER} --batch.global_size 8"),
        (FunctionFault(ADD, without_second_leaf),),
        axes=ANY_AXIS,
        blocks=("head",),
    ),
    Mutant(
        "the_fixed_order_leaves_out_a_rank",
        "deterministic sums over ranks lose a term",
        MutantLayout("dp2", options=FIXED_ORDER),
        (FunctionFault("weft.parallel.zero.fixed_order:tree_sum", without_last_row),),
        axes=(DP_AXIS,),
        blocks=("head",),
    ),
    Mutant(
        "the_fixed_order_adds_a_micro_batch_twice",
        "deterministic gradients of ZeRO 2, which are added after every backward",
        MutantLayout("dp2", options=f"{FIXED_ORDER} --parallel.zero 2 --batch.global_size 8"),
        (FunctionFault(ADD, doubled_second_leaf),),
        axes=ANY_AXIS,
        blocks=("head",),
    ),
)
