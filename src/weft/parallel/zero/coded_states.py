"""States of the shards of a torch optimizer in 8 bits between its steps: see Note [Blocks of states] in state_codes.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.config.optimizers import LEAST_BLOCKS
from weft.core.axes import Box, boxes_of_range
from weft.core.mesh import axis_names
from weft.parallel.zero.param_entries import ParamEntries
from weft.parallel.zero.shard_entries import ShardEntries, ShardGroup
from weft.parallel.zero.sharded_tensor import ShardedTensor, sharded
from weft.parallel.zero.state_codes import SIGNED, UNSIGNED, StateBlocks, join_cut_blocks

NEVER_NEGATIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "step_size"}
)
"""States of torch's own optimizers that are never negative; codes of all others have a sign, as
have all of other classes, in which such a name may mean another thing.
"""
OF_TORCH = "torch.optim."
"""Start of the modules of torch's own optimizers."""


@dataclass(frozen=True)
class StateCodes:
    """One state of a shard.

    Attributes:
        dtype: of its values.
    """

    blocks: StateBlocks
    codes: Tensor
    absmax: Tensor
    dtype: torch.dtype

    def values(self) -> Tensor:
        """What the codes stand for, of this rank's entries."""
        return self.blocks.decode(self.codes, self.absmax, dtype=self.dtype)


class CodedStates:
    """The codes of the states of large matrices, between two steps.

    Args:
        length: entries of a block.
        never_negative: states whose codes have no sign.
    """

    def __init__(self, group: ShardGroup, length: int, *, never_negative: frozenset[str]) -> None:
        self._never_negative = never_negative
        self._group = group
        self._length = length
        self._codes: dict[Tensor, dict[str, StateCodes]] = {}
        self._blocks: dict[Tensor, StateBlocks] = {}

    def of_shard(self, shard: Tensor) -> dict[str, Tensor]:
        """The values of the coded states of a shard."""
        coded = self._codes.get(shard, {})
        return {key: sharded(shard).with_local(codes.values()) for key, codes in coded.items()}

    def decode(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Put values in place of codes."""
        for shard in self._codes:
            states[shard].update(self.of_shard(shard))
        self._codes.clear()

    def encode(self, states: Mapping[Tensor, dict[str, Any]], shards: Sequence[Tensor]) -> None:
        """Put codes in place of the values of these shards' states; a collective over the ranks."""
        found = [
            (shard, key, value)
            for shard in shards
            if self._is_large(sharded(shard))
            for key, value in states.get(shard, {}).items()
            if isinstance(value, ShardedTensor) and value.is_floating_point()
        ]
        blocks = [self._blocks_of(shard) for shard, _, _ in found]
        largest = [
            each.absmax(value.local) for each, (*_, value) in zip(blocks, found, strict=True)
        ]
        axes = axis_names(self._group.axis)
        join_cut_blocks(blocks, largest, comm=self._group.comm, axes=axes)
        for (shard, key, value), of_key, absmax in zip(found, blocks, largest, strict=True):
            dtype = UNSIGNED if key in self._never_negative else SIGNED
            codes = torch.empty_like(value.local, dtype=dtype)
            of_key.encode(value.local, absmax, codes)
            self._codes.setdefault(shard, {})[key] = StateCodes(of_key, codes, absmax, value.dtype)
            del states[shard][key]

    @contextmanager
    def decoded(self, states: Mapping[Tensor, dict[str, Any]]) -> Iterator[None]:
        """Inside the block states have values, beside their codes."""
        for shard in self._codes:
            states[shard].update(self.of_shard(shard))
        try:
            yield
        finally:
            for shard, coded in self._codes.items():
                for key in coded:
                    del states[shard][key]

    def clear(self) -> None:
        """Forget all codes."""
        self._codes.clear()

    def _is_large(self, shard: ShardedTensor) -> bool:
        return shard.dim() >= 2 and shard.numel() >= LEAST_BLOCKS * self._length

    def _blocks_of(self, shard: Tensor) -> StateBlocks:
        if shard not in self._blocks:
            entries = _param_entries(sharded(shard).entries, self._group)
            self._blocks[shard] = StateBlocks.of(entries, self._length)
        return self._blocks[shard]


def _param_entries(entries: ShardEntries, group: ShardGroup) -> ParamEntries:
    def boxes_at(index: int) -> tuple[Box, ...]:
        start, stop = entries.starts[index : index + 2]
        return boxes_of_range(Box.whole(entries.shape), start, stop)

    return ParamEntries(
        entries.shape,
        (),
        axes=axis_names(group.axis),
        index=entries.index,
        boxes_at=boxes_at,
        num_holders=len(entries.starts) - 1,
    )
