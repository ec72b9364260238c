"""Blocks of a parallel model that drop out: which entries of each call's tensor a rank holds, as the transforms find out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.dimension import activation_axes, position_axes
from weft.core.entry_places import WHOLE, DimShard, ShardingRank
from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.batch import Batch, activation_of
from weft.models.common.dropout import DropoutDraws
from weft.models.common.dropout_mode import (
    CallShards,
    CounterDropout,
    dropout_settings,
    has_compiled,
    may_drop,
)
from weft.models.runs_without_memory import run_without_memory
from weft.parallel.model.chain import ChainSnapshot, PlainChain
from weft.parallel.model.compiled_block import CompiledBlock
from weft.parallel.recompute.blocks import OffloadedBlock, RecomputedBlock


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
        """Note the call; there are no draws."""
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

    def add_whole(self, snapshot: ChainSnapshot, comm: Comm) -> None:
        """Compare with the calls of the plain chain on whole sequences, of which its batch is the part
        of one context-parallel rank.
        """
        num_parts = comm.degree(position_axes())

        def find(chain: PlainChain) -> dict[str, tuple[CallShards, ...]]:
            whole = chain.batch.map(lambda x: x if x.dim() == 1 else torch.cat([x] * num_parts, 1))
            shapes = call_shapes(chain.blocks, whole)
            return {
                name: tuple((WHOLE,) * len(shape) for shape in own) for name, own in shapes.items()
            }

        self.add(calls_of(snapshot, comm, ("whole", num_parts), find))

    def add(self, found: Mapping[str, Sequence[CallShards]]) -> None:
        """Join what one axis shards with what others do.

        Raises:
            PlanError: a block drops out in other calls where it was looked at differently.
        """
        if self.calls is None:
            self.calls = {name: tuple(calls) for name, calls in found.items()}
            return
        for name in dict.fromkeys((*self.calls, *found)):  # in the order of the chain
            known, new = self.calls.get(name, ()), tuple(found.get(name, ()))
            check_calls(name, known, new)
            self.calls[name] = tuple(map(_joined, known, new))

    def of_block(self, name: str) -> tuple[CallShards, ...] | None:
        """The calls of a block; None: nothing is sharded, and they are not known."""
        return None if self.calls is None else self.calls.get(name, ())

    def may_drop(self, name: str, block: nn.Module) -> bool:
        """Whether a forward of the block may drop out, as far as is known."""
        calls = self.of_block(name)
        return may_drop(block) if calls is None else bool(calls)


def check_calls(name: str, one: Sequence[object], other: Sequence[object]) -> None:
    """Reject a block that drops out in other calls on whole sequences and on parts of them.

    Raises:
        PlanError: the numbers of calls differ.
    """
    if len(one) != len(other):
        what = "drops out in other calls on whole sequences than on a rank's part of them"
        got = f"{len(one)} and {len(other)} calls"
        raise PlanError(Fault(name, what, got=got, fix="a forward without branches on sizes"))


def calls_of(
    snapshot: ChainSnapshot,
    comm: Comm,
    key: Hashable,
    find: Callable[[PlainChain], dict[str, tuple[CallShards, ...]]],
) -> Mapping[str, tuple[CallShards, ...]]:
    """What `find` returns for the plain chain; rank threads of one process run it once for each key."""
    if snapshot.fingerprint is None:
        return find(snapshot.chain())
    repeats = tuple(snapshot.repeats.items())
    key = ("calls of dropout", key, snapshot.fingerprint, repeats)
    return comm.share_in_process(key, lambda: find(snapshot.chain()))


def call_shapes(blocks: Mapping[str, nn.Module], batch: Batch) -> dict[str, list[tuple[int, ...]]]:
    """Block -> the shape of the tensor of each call of dropout, of a plain chain without memory."""
    if not drops_out(blocks.values()):
        return {name: [] for name in blocks}
    return run_without_memory(_call_shapes, dict(blocks), batch)


def _call_shapes(blocks: Mapping[str, nn.Module], batch: Batch) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    x: Any = batch.inputs
    for number, (name, block) in enumerate(blocks.items(), start=1):
        shapes = found.setdefault(name, [])
        if number == len(blocks) and not may_drop(block):
            break  # a loss, which may read more than an example batch has

        def note(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> None:
            shapes.append(tuple(tensor.shape))

        try:
            with torch.no_grad(), NotedDropout(name, note):
                x = activation_of(block(x, batch))
        except PlanError:
            raise
        except Exception as error:
            what = f"its forward fails without values: {type_and_message(error)}"
            fix = "shapes must not depend on values; create tensors on x.device"
            raise PlanError(Fault(name, what, fix=fix)) from error
    return found


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
    """The block, in which dropout is by counter; itself where it drops nothing."""
    if not shards.may_drop(name, block) or has_compiled(block):
        return block
    return DroppingBlock(name, block, shards.of_block(name), rank)


def without_dropout(block: nn.Module) -> nn.Module:
    """The block itself, to look at. Its forward is not called, as torch's dropout would act in it."""
    return block.block if isinstance(block, DroppingBlock) else block


@dataclass(frozen=True)
class BlockName:
    """The name of a block; equal to any other, since blocks that drop other entries cost the same."""

    text: str = field(compare=False)


class DroppingBlock(nn.Module):
    """A block that drops out by counter: see Note [Counter-based dropout] in models/common/dropout.py.

    A block of users' code is seen to drop nothing in its first training forward; the later ones run
    without the mode, until a number that a module has as an attribute is changed, as a probability.
    """

    def __init__(
        self, name: str, block: nn.Module, calls: tuple[CallShards, ...] | None, rank: ShardingRank
    ) -> None:
        super().__init__()
        self.name = BlockName(name)
        self.block = block
        self.calls = calls
        self.rank = rank
        self._without: tuple[float, ...] | None = None  # settings with which nothing is dropped

    def forward(self, x: Tensor, batch: Batch) -> Any:
        """The block's own forward."""
        if self._without is not None and self._without == dropout_settings(self.block):
            return self.block(x, batch)
        mode = CounterDropout(
            self.name.text,
            batch.draw_keys,
            calls=self.calls,
            rank=self.rank,
            documents_BT=batch.documents_of_sequences,
        )
        with mode:
            out = self.block(x, batch)
        # Without keys nothing may be drawn (evaluation), so that forward shows nothing about training.
        if batch.draw_keys is not None:
            self._without = None if mode.num_calls else dropout_settings(self.block)
        return out


def block_as_written(block: nn.Module) -> nn.Module:
    """The block that a model file has, whose modules have the names of its parameters."""
    while isinstance(block, RecomputedBlock | OffloadedBlock | DroppingBlock | CompiledBlock):
        block = block.block
    return block
