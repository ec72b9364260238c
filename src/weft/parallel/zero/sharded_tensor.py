"""`ShardedTensor`: a tensor of which each rank holds some entries, and which scripts see as the whole one.

Optimizers and clipping of plain scripts read `shape` and `ndim`, take norms, and update values. Here these
are those of the whole tensor, while the memory is that of this rank's entries:

    function                          what happens
    elementwise: add, lerp_, sqrt     on this rank's entries; the result is sharded alike
    sums and norms over all entries   of this rank's entries, then one all-reduce
    everything else: matmul, view     on the whole tensor, all-gathered: every rank calls it

What changes its first argument then keeps this rank's entries of the result. So an optimizer that updates
each entry by itself communicates nothing; LARS and LAMB all-reduce their norms, and Muon gathers the
matrices that it orthogonalises, without a line of code for any of them.

Note [Why not DTensor]
    torch's DTensor shards along a dimension of the tensor, and needs torch.distributed. Here a shard is a
    range of the entries of a group's flat memory, which is gathered and reduced without a copy, and ranks
    may be threads. What a script sees is the same: `shape`, `ndim`, norms and values of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.parallel.autograd.rank_part import Form, part_of, reject_distributed_checkpoint
from weft.parallel.autograd.tensor_functions import (
    changes_first_argument,
    is_elementwise,
    is_local_read,
)
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.zero import distributed_checkpoint as dcp
from weft.parallel.zero.shard_entries import ShardEntries, ShardGroup

Handler = Callable[[Sequence[Any], dict[str, Any]], Any]
"""(arguments, options) -> what the function returns; NotImplemented for arguments that it does not take."""
SPECIAL: dict[Any, Handler] = {}
"""Functions that are neither elementwise nor taken of the whole tensor: see sharded_functions.py."""


class ShardedTensor(Tensor):
    """This rank's entries of a tensor, one-dimensional in memory, with the shape of the whole tensor.

    Made by the wrappers; results of elementwise functions are sharded alike, other results are plain
    tensors, equal on every rank.
    """

    entries: ShardEntries
    group: ShardGroup | None

    @staticmethod
    def of(local: Tensor, entries: ShardEntries, group: ShardGroup | None) -> ShardedTensor:
        """The tensor of which `local[n]` are this rank's entries, in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            sharded = local.as_subclass(ShardedTensor)
        sharded.entries = entries
        sharded.group = group
        return sharded

    @property
    def local(self) -> Tensor:
        """This rank's entries, one-dimensional, in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def with_local(self, local: Tensor) -> ShardedTensor:
        """A tensor that is sharded alike, of these entries."""
        return ShardedTensor.of(local, self.entries, self.group)

    def full_tensor(self) -> Tensor:
        """The whole tensor, in new memory; a collective. Its gradient is that of this rank's entries."""
        whole: Tensor = _WholeTensor.apply(self.local, self)  # type: ignore[no-untyped-call]
        return whole

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole tensor."""
        return torch.Size(self.entries.whole_shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims of the whole tensor."""
        return len(self.entries.whole_shape)

    def dim(self) -> int:
        """The number of dims of the whole tensor."""
        return len(self.entries.whole_shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape of the whole tensor, or its size in one dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Entries of the whole tensor."""
        return math.prod(self.entries.whole_shape)

    nelement = numel

    def __len__(self) -> int:
        return self.entries.whole_shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        own = self.entries.own
        return (
            f"ShardedTensor(shape={list(self.shape)}, dtype={self.dtype}, "
            f"entries {own.start} to {own.stop} of {self.entries.starts[-1]} on this rank)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = ShardedTensor.of(self.local.detach().clone(), self.entries, self.group)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        entries = self.entries
        state = (
            self.local.detach(),
            entries.shape,
            entries.starts,
            entries.index,
            entries.of_layer,
        )
        return _load_shard, state

    # torch.distributed.checkpoint calls these three: a file of it has boxes of entries, which any number of
    # ranks, and DTensors, load.

    def __create_write_items__(self, fqn: str, tensor: ShardedTensor) -> list[Any]:
        if tensor.group is not None and tensor.group.holders is not None:
            reject_distributed_checkpoint(fqn)
        return dcp.write_items(fqn, tensor.entries, tensor.local)

    def __create_chunk_list__(self) -> list[Any]:
        if self.group is not None and self.group.holders is not None:
            reject_distributed_checkpoint("a sharded weight")
        return dcp.chunks(self.entries)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return dcp.part_at(index.offset, self.entries, self.local)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        special = SPECIAL.get(func)
        if special is not None:
            result = special(args, options)
            if result is not NotImplemented:
                return result
        if is_local_read(func):
            return run_plainly(func, args, options)
        if is_elementwise(func):
            result = _elementwise(func, args, options)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, options)


class _WholeTensor(torch.autograd.Function):
    """This rank's entries -> the whole tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharded: ShardedTensor) -> Tensor:
        ctx.entries = sharded.entries
        ctx.group = group_of([sharded])
        whole: Tensor = ctx.group.gathered(local, sharded.entries)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.own_entries(gradient, ctx.entries), None


class Gathering:
    """A gathered copy of a sharded tensor, of which views are in use, and the version of what it was copied
    from.
    """

    def __init__(self, source: ShardedTensor) -> None:
        self.source = source
        group = group_of([source])
        self.holders = group.holders if source.entries.of_layer is None else None
        whole = source.full_tensor()
        self.whole = whole if self.holders is None else part_of(whole, self.holders)
        self._seen = (source._version, whole._version)

    def refresh(self) -> None:
        """Gather again where the tensor has changed since; a collective then."""
        if self.source._version != self._seen[0]:
            with torch.no_grad():
                self.whole.copy_(self.source.full_tensor())
            self._seen = (self.source._version, self.whole._version)

    def write_back(self) -> bool:
        """Keep this rank's entries where the copy, or a view of it, has been written; whether it has."""
        if self.whole._version == self._seen[1]:
            return False
        with torch.no_grad():
            group = group_of([self.source])
            self.source.local.copy_(group.own_entries(self.whole, self.source.entries))
        self._seen = (self.source._version, self.whole._version)
        return True


class GatheredView(Tensor):
    """A view of a gathered copy of a sharded tensor: what is written into it is written into the tensor."""

    gathering: Gathering

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            views = [each for each in tensors_in((args, options)) if isinstance(each, GatheredView)]
            gatherings = list({id(each.gathering): each.gathering for each in views}.values())
            for gathering in gatherings:
                gathering.refresh()
        if any(each.holders is not None for each in gatherings):
            args, options = map_leaves((tuple(args), options), GatheredView, _as_part)
            result = func(*args, **options)
        else:
            result = run_plainly(func, args, options)
        for gathering in gatherings:
            gathering.write_back()
        return _mark_views(result, gatherings)


def _as_part(view: GatheredView) -> Tensor:
    """The same memory as a part, where a tensor-parallel layer has the parameter."""
    holders = view.gathering.holders
    return view if holders is None else part_of(view, holders, Form.VIEW)


def run_plainly(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The function on the memory of this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **options)


def shards_in(tree: Any) -> list[ShardedTensor]:
    return [tensor for tensor in tensors_in(tree) if isinstance(tensor, ShardedTensor)]


def adopt_group(shards: Sequence[ShardedTensor]) -> None:
    """Give tensors that were loaded from a file the group of those that they are computed with."""
    strangers = [shard for shard in shards if shard.group is None]
    if strangers and len(strangers) < len(shards):
        group = group_of(shards)
        for shard in strangers:
            shard.group = group


def group_of(shards: Iterable[ShardedTensor]) -> ShardGroup:
    for shard in shards:
        if shard.group is not None:
            return shard.group
    fault = Fault(
        "a sharded tensor",
        "was loaded from a file, so it belongs to no group of ranks yet",
        fix="load it into the optimizer or the wrapped module that it was saved of",
    )
    raise PlanError(fault)


def _elementwise(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The function on this rank's entries; NotImplemented where arguments are not sharded alike."""
    if func.__name__.startswith(("_foreach_", "_fused_")):
        return _elementwise_lists(func, args, options)
    shards = shards_in((args, options))
    adopt_group(shards)
    entries, group = shards[0].entries, shards[0].group
    if any(shard.entries != entries for shard in shards):
        return NotImplemented
    is_in_place = changes_first_argument(func)
    if is_in_place and not isinstance(args[0], ShardedTensor):
        return NotImplemented
    own: list[Any] = []
    for arg in args:
        part = _own_part(arg, shards[0])
        if part is NotImplemented:
            return NotImplemented
        own.append(part)
    own_options: dict[str, Any] = {}
    for key, option in options.items():
        part = _own_part(option, shards[0])
        if part is NotImplemented or key == "out":
            return NotImplemented
        own_options[key] = part
    result = run_plainly(func, own, own_options)
    if is_in_place:
        return args[0]
    return map_leaves(result, Tensor, lambda local: ShardedTensor.of(local, entries, group))


def own_entries(whole: Tensor, shard: ShardedTensor) -> Tensor:
    """This rank's entries of a tensor that is expanded to the whole shape."""
    whole = whole.expand(shard.entries.whole_shape)
    if shard.entries.of_layer is None:
        return whole.reshape(-1)[shard.entries.own]
    return group_of([shard]).own_entries(whole, shard.entries)


def _own_part(value: Any, shard: ShardedTensor) -> Any:
    """This rank's part of an argument: scalars as they are, of whole tensors the own entries.

    NotImplemented for tensors of other shapes.
    """
    if not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
        return value
    if value.dim() == 0:
        return value
    if value.dim() > shard.ndim:
        return NotImplemented
    try:
        return own_entries(value, shard)
    except RuntimeError:
        return NotImplemented


def _elementwise_lists(
    func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> Any:
    """A function of lists of tensors, of which each list has one for each parameter.

    NotImplemented where a list has whole tensors.
    """
    lists = [arg for arg in (*args, *options.values()) if isinstance(arg, (list, tuple))]
    first = next(each for each in lists if shards_in(each))
    for each in lists:
        for tensor, shard in zip(each, first, strict=False):
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                continue
            if _entries_of(tensor) != _entries_of(shard):
                if func.__name__.startswith("_fused_"):
                    _reject_mixed_states()
                return NotImplemented
            if isinstance(tensor, ShardedTensor) and tensor.group is not shard.group:
                adopt_group((tensor, shard))
    result = run_plainly(func, args, options)
    if not isinstance(result, (list, tuple)):
        return result
    return [
        ShardedTensor.of(local, shard.entries, shard.group)
        if isinstance(shard, ShardedTensor)
        else local
        for local, shard in zip(result, first, strict=True)
    ]


def _reject_mixed_states() -> None:
    """Raise PlanError: one kernel would update states of whole tensors by gradients of shards."""
    fault = Fault(
        "optimizer",
        "has states of the whole parameters, from steps before the module was wrapped",
        fix="fused=False, or make the optimizer after wrapping",
    )
    raise PlanError(fault)


def _entries_of(tensor: Tensor) -> ShardEntries | None:
    return tensor.entries if isinstance(tensor, ShardedTensor) else None


def _on_whole(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The function on gathered tensors. Into which of them it has written is seen by their versions: their
    own entries are kept.
    """
    adopt_group(shards_in((args, options)))
    gathered: dict[int, Gathering] = {}

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedTensor):
            return tensor
        if id(tensor) not in gathered:
            gathered[id(tensor)] = Gathering(tensor)
        return gathered[id(tensor)].whole

    whole_args = map_leaves(tuple(args), Tensor, whole)
    whole_options = map_leaves(options, Tensor, whole)
    result = func(*whole_args, **whole_options)
    gatherings = list(gathered.values())
    shard_of = {id(each.whole): each.source for each in gatherings if each.write_back()}
    result = map_leaves(result, Tensor, lambda tensor: shard_of.get(id(tensor), tensor))
    return _mark_views(result, gatherings)


def _mark_views(result: Any, gatherings: Sequence[Gathering]) -> Any:
    """Tensors of the result that share memory with a gathered copy, as `GatheredView`."""

    def marked(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor) or tensor.layout != torch.strided:
            return tensor
        gathering = memory.get(tensor.untyped_storage().data_ptr())
        if gathering is None:
            return tensor
        view = tensor.as_subclass(GatheredView)
        view.gathering = gathering
        return view

    with torch._C.DisableTorchFunctionSubclass():
        memory = {
            each.whole.untyped_storage().data_ptr(): each
            for each in gatherings
            if each.whole.numel() > 0
        }
        return map_leaves(result, Tensor, marked)


def sharded(tensor: Tensor) -> ShardedTensor:
    """A parameter of a wrapper, by its type."""
    assert isinstance(tensor, ShardedTensor), "wrappers make sharded parameters"
    return tensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's entries; autograd leaves plain tensors in the place of sharded gradients."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


def _load_shard(
    local: Tensor,
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    index: int,
    of_layer: tuple[int, ...] | None = None,
) -> ShardedTensor:
    layer = None if of_layer is None else tuple(of_layer)
    return ShardedTensor.of(local, ShardEntries(tuple(shape), tuple(starts), index, layer), None)


torch.serialization.add_safe_globals([_load_shard])
