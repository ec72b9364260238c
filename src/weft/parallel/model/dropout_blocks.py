"""Blocks of a parallel model that drop out: which entries of each call's tensor a rank holds, as the transforms find out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.dimension import activation_axes, position_axes
from weft.core.entry_places import WHOLE, DimShard, ShardingRank
from weft.errors import Fault, PlanError
from weft.models.common.batch import Batch
from weft.models.common.dropout import DropoutDraws
from weft.models.common.dropout_mode import CallShards, CounterDropout, has_compiled, may_drop


def sharding_rank(comm: Comm) -> ShardingRank:
    """This rank among those that share activations."""
    return ShardingRank(
        context_index=comm.index(position_axes()),
        context_degree=comm.degree(position_axes()),
        tensor_index=comm.index(activation_axes()),
        tensor_degree=comm.degree(activation_axes()),
    )


class NotedDropout(CounterDropout):
    """A forward that drops nothing, and calls `note` with the tensor of each call that would."""

    def __init__(self, block: str, note: Callable[[Tensor], None]) -> None:
        super().__init__(block, None)
        self._note = note

    def draws(self, x: Tensor, shape: tuple[int, ...], p: float) -> DropoutDraws | None:
        """None."""
        self._note(x)
        return None


@dataclass
class DropoutShards:
    """How the tensors of calls are sharded, by block; transforms add what they find.

    Attributes:
        calls: block -> calls of its forward, each with the dims of its tensor; None: no axis shards
            activations.
    """

    calls: dict[str, tuple[CallShards, ...]] | None = None

    def add(self, found: Mapping[str, Sequence[CallShards]]) -> None:
        """Join what one axis shards with what others do.

        Raises:
            PlanError: a block drops out in other calls where it was looked at differently.
        """
        if self.calls is None:
            self.calls = {name: tuple(calls) for name, calls in found.items()}
            return
        for name in {*self.calls, *found}:
            known, new = self.calls.get(name, ()), tuple(found.get(name, ()))
            if len(known) != len(new):
                what = "drops out in other calls where its length differs"
                got = f"{len(known)} and {len(new)} calls"
                raise PlanError(Fault(name, what, got=got, fix="a forward without branches"))
            self.calls[name] = tuple(map(_joined, known, new))

    def of_block(self, name: str) -> tuple[CallShards, ...] | None:
        """The calls of a block; None: nothing is sharded, and they are not known."""
        return None if self.calls is None else self.calls.get(name, ())


def _joined(known: CallShards, new: CallShards) -> CallShards:
    return tuple(
        DimShard(
            columns=one.columns or other.columns,
            sharded=one.sharded or other.sharded,
            parts=one.parts or other.parts,
        )
        for one, other in zip_longest(known, new, fillvalue=WHOLE)
    )


def drops_out(blocks: Iterable[nn.Module]) -> bool:
    """Whether one of these blocks may drop out."""
    return any(map(may_drop, blocks))


def dropping_block(
    name: str, block: nn.Module, shards: DropoutShards, rank: ShardingRank
) -> nn.Module:
    """The block, in which drop-out is by counter; itself where it drops nothing."""
    calls = shards.of_block(name)
    drops = may_drop(block) if calls is None else bool(calls)
    if not drops or has_compiled(block):
        return block
    return DroppingBlock(name, block, calls, rank)


class DroppingBlock(nn.Module):
    """A block that drops out by counter: see Note [Counter-based drop-out] in models/common/dropout.py.

    A block of users' code is seen to drop nothing in its first training forward; the later ones run
    without the mode.
    """

    def __init__(
        self, name: str, block: nn.Module, calls: tuple[CallShards, ...] | None, rank: ShardingRank
    ) -> None:
        super().__init__()
        self.name = name
        self.block = block
        self.calls = calls
        self.rank = rank
        self._drops = True

    def forward(self, x: Tensor, batch: Batch) -> Any:
        """The block's own forward."""
        if not self._drops:
            return self.block(x, batch)
        mode = CounterDropout(self.name, batch.draw_keys, calls=self.calls, rank=self.rank)
        with mode:
            out = self.block(x, batch)
        if batch.draw_keys is not None:
            self._drops = mode.num_calls > 0
        return out
