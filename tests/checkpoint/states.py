"""Small checkpoints for tests: random tensors, random cuts, several ranks in one process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.commit import commit
from weft.checkpoint.folder import checkpoint_path, temporary_path
from weft.checkpoint.format import Facts
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem
from weft.core.axes import Box, boxes_of_range

State = Mapping[str, Tensor]
"""Stored name -> whole tensor."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def facts_of(step: int = 1, **changes: object) -> Facts:
    given = {
        "step": step,
        "seed": 1,
        "family": "gpt2",
        "architecture": {"width": 8, "split": [2, 3]},
        "plan": {},
    }
    return Facts.model_validate({**given, **changes})


def bits(shape: Sequence[int], *, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.empty(tuple(shape), dtype=dtype).nbytes
    return (
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(tuple(shape))
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return raw(left) == raw(right)


def raw(tensor: Tensor) -> bytes:
    return (
        tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    )


def cut(box: Box, chance: random.Random) -> tuple[Box, ...]:
    """Boxes that make up `box`: a grid, or flat ranges, or grids of some parts of it again."""
    if box.size <= 1 or chance.random() < 0.2:
        return (box,)
    if chance.random() < 0.4:
        return _flat_ranges(box, chance)
    longer_than_one = [dim for dim, length in enumerate(box.shape) if length > 1]
    dim = chance.choice(longer_than_one)
    at = chance.randrange(box.lo[dim] + 1, box.hi[dim])
    left = Box(lo=box.lo, hi=_with_entry(box.hi, dim, at))
    right = Box(lo=_with_entry(box.lo, dim, at), hi=box.hi)
    return (*cut(left, chance), *cut(right, chance))


def _flat_ranges(box: Box, chance: random.Random) -> tuple[Box, ...]:
    num_cuts = chance.randrange(1, 5)
    cuts = [chance.randrange(box.size) for _ in range(num_cuts)]
    bounds = sorted({0, box.size, *cuts})
    boxes: list[Box] = []
    for start, stop in pairwise(bounds):
        boxes += boxes_of_range(box, start, stop)
    return tuple(boxes)


def _with_entry(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def held_by(state: State, *, ranks: int, seed: int) -> list[list[WriteItem]]:
    """Every entry of every tensor on one rank, cut by chance."""
    chance = random.Random(seed)
    hands: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for name, tensor in state.items():
        for box in cut(Box.whole(tensor.shape), chance):
            chance.choice(hands).append(
                WriteItem(name=name, shape=tuple(tensor.shape), box=box, tensor=tensor[box.slices])
            )
    return hands


def save(run: Path, state: State, *, step: int = 1, ranks: int = 2, seed: int = 0) -> Path:
    """A checkpoint of `run`, written by `ranks` ranks."""
    final = checkpoint_path(run, step)
    tmp = temporary_path(final)
    writings = [
        start_write(tmp, rank, held)
        for rank, held in enumerate(held_by(state, ranks=ranks, seed=seed))
    ]
    for writing in writings:
        writing.wait()
    commit(tmp, final, facts_of(step), ranks=ranks)
    return final


def small_state(seed: int = 0) -> dict[str, Tensor]:
    """A few tensors of every type, some kilobytes in all."""
    return {
        "model/embed.weight": bits((16, 8), dtype=torch.float32, seed=seed),
        "model/head.weight": bits((6, 5, 3), dtype=torch.bfloat16, seed=seed + 1),
        "model/layer0.router.bias": bits((7,), dtype=torch.float64, seed=seed + 2),
        "model/none.weight": bits((0, 4), dtype=torch.float32, seed=seed),
        "optim/exp_avg/embed.weight": bits((16, 8), dtype=torch.float32, seed=seed + 3),
        "optim/exp_avg/head.weight": bits((6, 5, 3), dtype=torch.float16, seed=seed + 4),
        "optim/step/embed.weight": bits((), dtype=torch.int64, seed=seed + 5),
    }
