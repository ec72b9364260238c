"""Memory that the plain pass of a step needs on a rank, and what the rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.comm.comm import Comm
from weft.core import machine_memory
from weft.prove.live_step.meta_chain import MetaChain
from weft.prove.live_step.units import Unit

COPIES_OF_A_BLOCK = 4
"""Gathered values, their cast, gradients and their sum."""
USES_OF_AN_OUTPUT = 3.0
"""Outputs of linears: kept for the backward, their gradients, and what is computed from them."""


def needed_bytes(chain: MetaChain, units: Sequence[Unit], *, seq_len: int, itemsize: int) -> int:
    """Estimate of the peak on one rank: copies of the largest block, the inputs of all blocks, and
    what one block keeps for its backward.
    """
    largest_block = max(sum(map(_numel, chain.of_block(name).values())) for name in chain.blocks)
    num_rows = sum(len(unit.rows) * (1 + len(unit.noise_seeds)) for unit in units)
    rows_at_once = max((len(unit.rows) for unit in units), default=0)
    dim = next((shape[-1] for shape in chain.shapes.values() if len(shape) > 1), 1)
    inputs = len(chain.blocks) * num_rows * seq_len * dim
    widest = max(_output_entries(chain.of_block(name)) for name in chain.blocks)
    work = int(USES_OF_AN_OUTPUT * rows_at_once * seq_len * widest)
    return (COPIES_OF_A_BLOCK * largest_block + inputs + work) * max(itemsize, 4)


def available_bytes(comm: Comm) -> int:
    """Memory that this rank may take: of a GPU what is free, of a machine its share."""
    if comm.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(comm.device)
        return int(free)
    num_ranks = comm.mesh.size  # at most: other machines may hold some of them
    return machine_memory.available_bytes() // num_ranks


def _output_entries(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Entries that the linears of a block put out for a token."""
    return sum(shape[-2] for shape in shapes.values() if len(shape) >= 2)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
