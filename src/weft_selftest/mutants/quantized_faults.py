"""Mutants of frozen matrices in 4 bits: scales, levels, and where their blocks are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.models.common.nf4 import ABSMAX_BYTES, unpacked_width
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.changes import returns
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

NF4 = "weft.models.common.nf4"
OPTIONS = "--lora.rank 3 --lora.quantize nf4 --model.dim 96"
"""A width of more than one block."""


def neighbours_absmax(unpacked: Callable[..., Tensor], packed: Tensor, **options: bool) -> Tensor:
    """Entries are multiplied by the absmax of the block behind theirs."""
    num_codes = unpacked_width(packed.shape[1]) // 2
    moved = packed.clone()
    moved[:, num_codes:] = packed[:, num_codes:].roll(ABSMAX_BYTES, 1)
    return unpacked(moved, **options)


def next_levels(borders: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """The border above each level is that below it."""
    first, *others = borders()
    return (-1.0, first, *others[:-1])


def other_dims(dims: Callable[..., dict[str, int]], *args: Any) -> dict[str, int]:
    """Blocks run along the dim that tp cuts."""
    return {name: 1 - dim for name, dim in dims(*args).items()}


MUTANTS = (
    Mutant(
        "blocks_of_a_quantized_matrix_have_the_scale_of_their_neighbours",
        "the largest entry of another block of 64",
        MutantLayout("dp2", options=OPTIONS),
        (FunctionFault(f"{NF4}:_unpacked", neighbours_absmax),),
        axes=(DP_AXIS, ""),
        blocks=("layer*",),
    ),
    Mutant(
        "levels_of_a_quantized_matrix_are_off_by_one",
        "every code is that of the next level",
        MutantLayout("dp2", options=f"{OPTIONS} --parallel.zero 3"),
        (FunctionFault(f"{NF4}:borders", next_levels),),
        axes=(DP_AXIS, ""),
        blocks=("layer*",),
    ),
    Mutant(
        "blocks_of_a_quantized_matrix_are_cut_by_tp",
        "they run along the dim of which each rank holds a part",
        MutantLayout("tp2", options=OPTIONS),
        (
            FunctionFault("weft.models.common.lora:block_dims", other_dims),
            FunctionFault("weft.train.build:check_borders", returns(None)),
        ),
        axes=(TP_AXIS, ""),
        blocks=("layer*",),
    ),
)
