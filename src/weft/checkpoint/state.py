"""Stored tensors of a training state: names and boxes that are the same under every layout, and what this rank writes.

    stored name                  content
    model/<parameter>            its values, in the dtype that the optimizer updates
    nf4/rows/<parameter>         its bytes, of a matrix that is held in 4 bits (checkpoint/quantized.py)
    model/<buffer>               the values of a buffer that training updates
    optim/<key>/<parameter>      optimizer state: of the parameter's shape ("exp_avg"), sums of its
                                 rows or columns ("row_var"), one number, 0-dim ("step"), or the
                                 largest values of blocks of codes ("exp_avg_absmax")

A tied parameter is stored under its owner's name. A parameter that is not trained (a router's bias)
has no optimizer state.

With local updates `model` holds the outer parameters, which every reader takes as the model; what
the sites have of their own, and the state of the outer optimizer, are further sections:

    site/<k>/model/<parameter>          values of site k
    site/<k>/optim/<key>/<parameter>    its optimizer state
    site/momentum/<parameter>           of the outer optimizer
    site/exchange/<parameter>           mean outer gradient that waits to be applied, if there is one
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.checkpoint.quantized import section_of
from weft.checkpoint.tensor_digest import digest_of_box
from weft.checkpoint.write_item import Snapshot, WriteItem, snapshot
from weft.core.axes import Box, blocks_begun_in, span
from weft.core.dimension import local_update_axes
from weft.parallel.local_updates.outer_shard import OuterPiece
from weft.parallel.local_updates.outer_step import LocalUpdates
from weft.parallel.model.parallelize import ParallelModel, ParamShard
from weft.parallel.pp import AXIS as PP
from weft.parallel.site import AXIS as SITE
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.quantized_group import QuantizedGroup
from weft.parallel.zero.state_codes import ABSMAX, StateBlocks

MODEL = "model"
OPTIMIZER = "optim"
OUTER_SECTIONS = {"outer": MODEL, "momentum": f"{SITE}/momentum", "exchange": f"{SITE}/exchange"}
"""What the outer optimizer keeps -> section."""

MIN_SHARED_ENTRIES = 2**14
"""Replicas share the writing of larger pieces; one of them writes a smaller piece alone. Proofs,
whose tensors are small, take fewer.
"""


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint stores of a training step on this rank, besides the facts in the manifest.

    Attributes:
        model: this rank's parameter shards.
        grads: the store whose `tensors` the optimizer updates: the parameters, or ZeRO shards and
            masters of them.
        optimizer_state: parameter name -> key ("exp_avg") -> tensor.
        optimizer_keys: trained parameter name -> the keys that its optimizer keeps, also of parameters
            that other ranks hold under ZeRO.
        state_blocks: parameter name -> its blocks, of those whose states have 8 bits.
        local_updates: the outer optimizer of a run over sites.
        min_shared_entries: of a piece whose writing replicas share.
    """

    model: ParallelModel
    grads: GradientReducer
    optimizer_state: Mapping[str, Mapping[str, Tensor]]
    optimizer_keys: Mapping[str, frozenset[str]]
    state_blocks: Mapping[str, StateBlocks] = field(default_factory=dict)
    local_updates: LocalUpdates | None = None
    min_shared_entries: int = MIN_SHARED_ENTRIES

    @property
    def trained_names(self) -> frozenset[str]:
        """Parameters here that the optimizer updates."""
        names = (
            name for name in self.grads.sharded_params if self.model.params[name].requires_grad
        )
        return frozenset(names)

    def stored_names(self) -> frozenset[str]:
        """Stored names of everything on this rank, including what other ranks hold of it under
        ZeRO.
        """
        names = {f"{MODEL}/{name}" for name in self.model.buffer_records.buffers()}
        for name, shard in self.model.shards.items():
            dim, double = self.model.quantized.get(name), self.model.has_double_blocks
            names.add(f"{MODEL if dim is None else section_of(dim, double=double)}/{shard.owner}")
            for key in self.optimizer_keys.get(name, ()):
                section = self.own_section(f"{OPTIMIZER}/{key}")
                names.add(f"{section}/{shard.owner}")
        return frozenset(names)

    def own_section(self, section: str) -> str:
        """The section of what this rank's site has of its own."""
        if self.local_updates is None:
            return section
        return f"{SITE}/{self.local_updates.site}/{section}"


@dataclass(frozen=True)
class ParamState:
    """Local entries of one parameter and of its optimizer state.

    Attributes:
        param: geometry of this rank's shard of the parameter.
        lo, hi: range of the shard's entries (row-major) that the tensors here hold.
        tensors: section ("model", "optim/exp_avg") -> those entries.
        whole: section -> a tensor of the whole parameter: one number, sums of its rows or columns.
        of_blocks: section ("optim/exp_avg_absmax") -> a number for each block of codes that any of
            those entries lie in; a block is written by the rank that writes its first entry.
        blocks: these blocks.
        replica_axes: mesh axes along which all ranks hold the same entries.
        num_replicas: ranks that hold the same entries.
        replica: index of this rank among them.
        is_alias: whether another rank holds the same parameter under its owner's name.
        min_shared_entries: of a piece whose writing replicas share.
        matrix: of the bytes of a matrix that is held in 4 bits: makes its entries, in float32.
    """

    param: ParamShard
    lo: int
    hi: int
    tensors: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    replica_axes: tuple[str, ...]
    num_replicas: int
    replica: int
    is_alias: bool
    min_shared_entries: int = MIN_SHARED_ENTRIES
    matrix: Callable[[], ParamState] | None = None
    of_blocks: Mapping[str, Tensor] = field(default_factory=dict)
    blocks: StateBlocks | None = None

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All local entries as boxes of the whole parameter, in row-major order."""
        return self.param.shard.boxes_of_range(self.lo, self.hi)

    @property
    def write_range(self) -> tuple[int, int]:
        """Range of the shard's entries that this rank writes, so that each entry is written by one
        replica.
        """
        nothing = (self.lo, self.lo)
        if self.is_alias:
            return nothing
        length = self.hi - self.lo
        if length < self.min_shared_entries:
            # A hash of the name, the same on every rank and in every run, spreads small tensors over the replicas.
            digest = zlib.crc32(self.param.owner.encode())
            writer = digest % self.num_replicas
            if writer != self.replica:
                return nothing
            return (self.lo, self.hi)
        start, stop = span(length, self.num_replicas, self.replica)
        return self.lo + start, self.lo + stop

    @property
    def writes_whole(self) -> bool:
        """Whether this rank writes the first entry of the whole parameter."""
        start, stop = self.write_range
        return start == 0 and stop > 0 and self.param.shard.holds_first_entry

    def write_items(self) -> Iterator[WriteItem]:
        """The pieces of this parameter that this rank writes."""
        owner = self.param.owner
        shape = self.param.shape
        start, stop = self.write_range
        for section, tensor in self.tensors.items():
            flat = tensor.detach().reshape(-1)
            entries = flat[start - self.lo : stop - self.lo]
            offset = 0
            for box in self.param.shard.boxes_of_range(start, stop):
                values = entries[offset : offset + box.size].view(box.shape)
                yield WriteItem(name=f"{section}/{owner}", shape=shape, box=box, tensor=values)
                offset += box.size
        yield from self._items_of_blocks(self.param.shard.boxes_of_range(start, stop))
        if self.writes_whole:
            for section, tensor in self.whole.items():
                tensor_shape = tuple(tensor.shape)
                yield WriteItem(
                    name=f"{section}/{owner}",
                    shape=tensor_shape,
                    box=Box.whole(tensor_shape),
                    tensor=tensor.detach(),
                )

    def _items_of_blocks(self, written: Sequence[Box]) -> Iterator[WriteItem]:
        """Those of which this rank writes the first entry."""
        for section, tensor in self.of_blocks.items():
            for own, box, values in self.views_of_blocks(tensor):
                for part in written:
                    begun = blocks_begun_in(part & own, self._block_length)
                    if begun.size:
                        yield WriteItem(
                            name=f"{section}/{self.param.owner}",
                            shape=self.shape_of_blocks,
                            box=begun,
                            tensor=values[begun.within(box)],
                        )

    def views_of_blocks(self, tensor: Tensor) -> Iterator[tuple[Box, Box, Tensor]]:
        """The boxes of entries here, the boxes of their blocks among all blocks, and their numbers."""
        if self.blocks is None:
            return
        parts = tensor.detach().split([box.size for box in self.blocks.boxes])
        for own, box, part in zip(self.boxes, self.blocks.boxes, parts, strict=True):
            yield own, box, part.view(box.shape)

    def decoded(self, section: str) -> Tensor:
        """The entries of a section; of codes the values that they stand for."""
        tensor = self.tensors[section]
        largest = self.of_blocks.get(section + ABSMAX)
        if largest is None:
            return tensor
        assert self.blocks is not None, "it has blocks"
        return self.blocks.decode(tensor, largest, dtype=self.tensors[MODEL].dtype)

    @property
    def shape_of_blocks(self) -> tuple[int, ...]:
        """All blocks of the parameter."""
        *rows, length = self.param.shape
        return (*rows, math.ceil(length / self._block_length))

    @property
    def _block_length(self) -> int:
        assert self.blocks is not None, "it has blocks"
        return self.blocks.length

    def digests(self) -> Iterator[BoxDigest]:
        """Digests of this parameter's entries here; each replica takes a share of every box. See
        Note [Digests of tensors].
        """
        if self.is_alias:
            return
        owner = self.param.owner
        for section, tensor in self.tensors.items():
            flat = tensor.detach().reshape(-1)
            offset = 0
            for box in self.boxes:
                values = flat[offset : offset + box.size].view(box.shape)
                offset += box.size
                yield from self._digest_of_share(f"{section}/{owner}", values, box)
        for section, tensor in self.of_blocks.items():
            for own, box, values in self.views_of_blocks(tensor):
                begun = blocks_begun_in(own, self._block_length)
                part = values[begun.within(box)]
                yield from self._digest_of_share(f"{section}/{owner}", part, begun)
        if self.lo == 0 and self.param.shard.holds_first_entry:
            for section, tensor in self.whole.items():
                box = Box.whole(tensor.shape)
                yield from self._digest_of_share(f"{section}/{owner}", tensor, box)

    def _digest_of_share(self, name: str, values: Tensor, box: Box) -> Iterator[BoxDigest]:
        """The digest of this replica's rows of a box, if it has any."""
        num_rows = box.shape[0] if box.lo else 1
        start, stop = span(num_rows, self.num_replicas, self.replica)
        if box.lo:
            values = values[start:stop]
            offset = box.lo[0]
            box = Box((offset + start, *box.lo[1:]), (offset + stop, *box.hi[1:]))
        if start < stop and box.size:
            yield BoxDigest(name, box.size, digest_of_box(values, box), values.dtype)

    def dequantized(self) -> ParamState:
        """The same with the entries of the parameter, in section "model"."""
        return self if self.matrix is None else self.matrix()


@dataclass(frozen=True)
class BoxDigest:
    """The digest of some entries of a stored tensor."""

    name: str
    num_entries: int
    digest: Tensor
    dtype: torch.dtype


def write_items(state: TrainState) -> tuple[WriteItem, ...]:
    """What this rank writes: over all ranks each entry is written once, and replicas share the
    work.

    The tensors are live: take a snapshot of them before training goes on.
    """
    items: list[WriteItem] = []
    for local in param_states(state):
        items.extend(local.write_items())
    return tuple(items)


def digests_of(state: TrainState) -> dict[str, Tensor]:
    """Stored name -> digest of what this rank holds of it, as one whole number on its device; over
    all ranks they add up to the digest of the tensor.
    """
    return digests_of_states(param_states(state))


def digests_of_states(states: Iterable[ParamState]) -> dict[str, Tensor]:
    """The same of the entries of these parameters."""
    found: dict[str, Tensor] = {}
    for local in states:
        for part in local.digests():
            before = found.get(part.name)
            found[part.name] = part.digest if before is None else before + part.digest
    return found


def snapshot_of(state: TrainState) -> Snapshot:
    """Copies of what this rank writes; the next change of the state waits for those under way."""
    copied = snapshot(write_items(state), digests_of(state))
    if copied.under_way:
        # On a GPU the copies read the live tensors until then.
        state.grads.before_next_change(copied.under_way.before_change)
    return copied


def param_states(state: TrainState) -> Iterator[ParamState]:
    """Values and optimizer state of every parameter with entries on this rank."""
    for local in _local_states(state):
        yield replace(local, min_shared_entries=state.min_shared_entries)


def _local_states(state: TrainState) -> Iterator[ParamState]:
    if state.local_updates is None:
        yield from _inner_states(state)
        return
    trained = state.trained_names
    for local in _inner_states(state):
        yield _of_site(state, local) if local.param.name in trained else local
    for piece, tensors in state.local_updates.stored():
        yield _outer_state(state, piece, tensors)


def _of_site(state: TrainState, local: ParamState) -> ParamState:
    """The same as what one site has of its own."""
    comm = state.model.comm
    axes = tuple(axis for axis in local.replica_axes if axis not in local_update_axes())
    return replace(
        local,
        tensors={state.own_section(name): tensor for name, tensor in local.tensors.items()},
        whole={state.own_section(name): tensor for name, tensor in local.whole.items()},
        of_blocks={state.own_section(name): tensor for name, tensor in local.of_blocks.items()},
        replica_axes=axes,
        num_replicas=comm.degree(axes),
        replica=comm.index(axes),
    )


def _outer_state(state: TrainState, piece: OuterPiece, tensors: Mapping[str, Tensor]) -> ParamState:
    """What all sites have in common of some entries of a parameter."""
    model = state.model
    comm = state.model.comm
    axes = local_update_axes()
    return ParamState(
        param=model.shards[piece.name],
        lo=piece.start,
        hi=piece.stop,
        tensors={OUTER_SECTIONS[name]: tensor for name, tensor in tensors.items()},
        whole={},
        replica_axes=axes,
        num_replicas=comm.degree(axes),
        replica=comm.index(axes),
        is_alias=_is_alias(model, piece.name),
    )


def _is_alias(model: ParallelModel, name: str) -> bool:
    return any(tie.name == name and not tie.is_owner for tie in model.cross_stage_ties)


def _inner_states(state: TrainState) -> Iterator[ParamState]:
    trained = state.trained_names
    for local in param_values(state.model, state.grads):
        name = local.param.name
        if name not in trained:
            yield local
            continue
        tensors = dict(local.tensors)
        whole: dict[str, Tensor] = {}
        of_blocks: dict[str, Tensor] = {}
        blocks = state.state_blocks.get(name)
        for key, value in state.optimizer_state[name].items():
            section = f"{OPTIMIZER}/{key}"
            if blocks is not None and key.endswith(ABSMAX):
                of_blocks[section] = value
            # Shapes tell them apart: both are this rank's entries, one for each of the parameter.
            elif value.shape == state.grads.sharded_params[name].shape:
                tensors[section] = value
            else:
                whole[section] = value
        yield replace(local, tensors=tensors, whole=whole, of_blocks=of_blocks, blocks=blocks)


def param_values(
    model: ParallelModel, grads: GradientReducer | None = None
) -> Iterator[ParamState]:
    """Values without optimizer state: those in `grads` (trained or sharded ones), else the
    parameters themselves.
    """
    yield from _buffer_states(model)
    if grads is None:
        for name, param in model.params.items():
            yield _param_state(model, name, param, lo=0, hi=param.numel())
        return
    tensors = {**grads.sharded_params, **grads.frozen_shards}
    for name, param in model.params.items():
        if name in tensors:
            lo, hi = grads.shard_ranges[name]
            if lo < hi:
                sharded_axes = grads.shard_axes.get(name, ())
                yield _param_state(
                    model, name, tensors[name], lo=lo, hi=hi, sharded_axes=sharded_axes
                )
        elif name in grads.quantized:
            if grads.quantized[name].packed[name].numel():
                yield _quantized_state(model, name, grads.quantized[name])
        elif not param.requires_grad:
            yield _param_state(model, name, param, lo=0, hi=param.numel())


def _quantized_state(model: ParallelModel, name: str, group: QuantizedGroup) -> ParamState:
    """The bytes of this rank's lines of a matrix."""
    shard = model.shards[name]
    lines = group.shard_of_lines(shard)

    def matrix() -> ParamState:
        return replace(
            state,
            param=lines,
            hi=lines.shard.size,
            tensors={MODEL: group.dequantized(name)},
            matrix=None,
        )

    packed = group.packed[name]
    of_matrix = _param_state(model, name, packed, lo=0, hi=packed.numel(), sharded_axes=group.axes)
    state = replace(
        of_matrix,
        param=group.shard_of_bytes(shard),
        tensors={section_of(group.dims[name], double=group.double): packed},
        matrix=matrix,
    )
    return state


def _buffer_states(model: ParallelModel) -> Iterator[ParamState]:
    """Buffers that training updates: whole on every rank of their stage."""
    comm = model.comm
    axes = tuple(axis for axis, _ in comm.mesh.axes if axis != PP)
    for name, buffer in model.buffer_records.buffers().items():
        yield ParamState(
            param=ParamShard.of_buffer(name, tuple(buffer.shape)),
            lo=0,
            hi=buffer.numel(),
            tensors={MODEL: buffer},
            whole={},
            replica_axes=axes,
            num_replicas=comm.degree(axes),
            replica=comm.index(axes),
            is_alias=False,
        )


def _param_state(
    model: ParallelModel,
    name: str,
    tensor: Tensor,
    *,
    lo: int,
    hi: int,
    sharded_axes: tuple[str, ...] = (),
) -> ParamState:
    param = model.shards[name]
    comm = model.comm
    distinct_axes = (PP, *param.shard_axes, *sharded_axes)
    replica_axes = tuple(axis for axis, _ in comm.mesh.axes if axis not in distinct_axes)
    return ParamState(
        param=param,
        lo=lo,
        hi=hi,
        tensors={MODEL: tensor},
        whole={},
        replica_axes=replica_axes,
        num_replicas=comm.degree(replica_axes),
        replica=comm.index(replica_axes),
        is_alias=_is_alias(model, name),
    )
