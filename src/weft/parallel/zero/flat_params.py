"""Parameters of a group in one flat tensor: their layout, its shards, and memory that is freed between uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError


@dataclass(frozen=True)
class ParamSpan:
    """Entries `start` to `stop` of a flat tensor: one parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ShardOverlap:
    """The entries that a parameter and a shard have in common; both slices may be empty.

    Attributes:
        in_param: their place in the flattened parameter.
        in_shard: their place in the shard.
    """

    in_param: slice
    in_shard: slice


@dataclass(frozen=True)
class FlatLayout:
    """Parameters end to end, or each at a multiple of some entries, padded at the end so that
    `num_shards` ranks hold shards of equal length.

        a ───────── b ── c ──────────── padding
        shard 0 ──────── shard 1 ──────────────

    Attributes:
        spans: one for each parameter, in memory order.
        length: entries of the flat tensor, padding included.
        num_shards: how many equal shards it is divided into.
    """

    spans: tuple[ParamSpan, ...]
    length: int
    num_shards: int

    @staticmethod
    def of(
        shapes: Mapping[str, tuple[int, ...]], num_shards: int, *, alignment: int = 1
    ) -> FlatLayout:
        """Lay out tensors of these shapes, in this order.

        Args:
            alignment: entries of which each start is a multiple.
        """
        spans: list[ParamSpan] = []
        start = 0
        for name, shape in shapes.items():
            start = -(-start // alignment) * alignment  # rounded up
            stop = start + math.prod(shape)
            span = ParamSpan(name, shape, start, stop)
            spans.append(span)
            start = stop
        num_entries = start
        shard_length = -(-num_entries // num_shards)  # rounded up
        return FlatLayout(
            spans=tuple(spans), length=shard_length * num_shards, num_shards=num_shards
        )

    @property
    def shard_length(self) -> int:
        """Entries of one shard."""
        return self.length // self.num_shards

    def shard_slice(self, index: int) -> slice:
        """The entries of the flat tensor that shard `index` consists of."""
        start = index * self.shard_length
        stop = start + self.shard_length
        return slice(start, stop)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's entries of `flat`, in the parameter's shape."""
        found: dict[str, Tensor] = {}
        for span in self.spans:
            entries = flat[span.start : span.stop]
            found[span.name] = entries.view(span.shape)
        return found

    def overlap(self, span: ParamSpan, index: int) -> ShardOverlap:
        """The entries of a parameter that lie in shard `index`."""
        shard = self.shard_slice(index)
        first = max(span.start, shard.start)
        first = min(first, shard.stop)
        last = min(span.stop, shard.stop)
        last = max(last, first)
        return ShardOverlap(
            in_param=slice(first - span.start, last - span.start),
            in_shard=slice(first - shard.start, last - shard.start),
        )

    def shard_views(self, shard: Tensor, index: int) -> dict[str, Tensor]:
        """Each parameter's entries of shard `index`, one-dimensional and perhaps empty."""
        found: dict[str, Tensor] = {}
        for span in self.spans:
            overlap = self.overlap(span, index)
            found[span.name] = shard[overlap.in_shard]
        return found

    def pack_shard(
        self, tensors: Mapping[str, Tensor], index: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Shard `index` of the flat tensor of `tensors`, without allocating the flat tensor."""
        shard = torch.zeros(self.shard_length, dtype=dtype, device=device)
        for span in self.spans:
            entries = tensors[span.name].detach().reshape(-1)
            overlap = self.overlap(span, index)
            shard[overlap.in_shard] = entries[overlap.in_param]
        return shard

    def pack(
        self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The flat tensor of `tensors`; the padding is 0."""
        flat = torch.zeros(self.length, dtype=dtype, device=device)
        for span in self.spans:
            entries = tensors[span.name].detach()
            flat[span.start : span.stop] = entries.reshape(-1)
        return flat


class FlatParams:
    """The parameters of a group as views into one flat tensor whose memory can be freed and
    allocated again.

    Note [Freed storage under saved tensors]
        A parameter that autograd has saved for the backward keeps its storage object. `free`
        resizes that storage to 0 bytes; before the backward `allocate` resizes it back and it is
        filled with the same values, so every saved view is valid again. It is filled through
        `alias`, which has a version counter of its own, so that autograd does not report the saved
        tensors as modified in place.

    Note [Reads of freed parameters]
        A kernel that reads a freed storage ends the process, and numpy reads memory of others. So
        where scripts reach the parameters, a freed one is one NaN, expanded: it keeps its shape,
        what is computed from it is NaN, and writes to it are an error. Views that autograd has saved
        are of the storage, and are not changed.

    Args:
        fills_freed: whether parameters are NaN while their memory is freed.

    Raises:
        PlanError: `expose` or `check_unwritten` finds that a parameter was written while its memory
            was freed.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        layout: FlatLayout,
        *,
        dtype: torch.dtype,
        fills_freed: bool = False,
    ) -> None:
        first = next(iter(params.values()))
        self.flat = layout.pack(params, dtype=dtype, device=first.device)
        storage = self.flat.untyped_storage()
        self._num_bytes = storage.nbytes()
        self._freed: list[_FreedParam] = []
        for name, view in layout.views(self.flat).items():
            # By `.data`, so that modules, optimizers and hooks keep the parameter object that they hold.
            params[name].data = view
            if fills_freed:
                freed = _FreedParam(name, params[name], view)
                self._freed.append(freed)

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is held."""
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def is_exposed(self) -> bool:
        """Whether the parameters show the memory, not NaN."""
        return not any(freed.is_filled for freed in self._freed)

    def free(self) -> None:
        """Free the memory; the parameters keep their storage object, or are NaN."""
        self.flat.untyped_storage().resize_(0)
        for freed in self._freed:
            freed.fill()

    def allocate(self) -> None:
        """Allocate the memory unless it is held; its values are undefined until `alias` has been
        filled, then call `expose`.
        """
        if not self.is_allocated:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def expose(self) -> None:
        """Have the parameters show the memory, which is allocated and filled."""
        for freed in self._freed:
            freed.restore()

    def check_unwritten(self) -> None:
        """Check that no parameter was written while its memory is freed.

        Raises:
            PlanError: one was.
        """
        for freed in self._freed:
            freed.check_unwritten()

    def alias(self) -> Tensor:
        """The same memory as a tensor with a version counter of its own."""
        alias = self.flat.new_empty(0)
        return alias.set_(self.flat.untyped_storage(), 0, self.flat.shape, self.flat.stride())


class _FreedParam:
    """A parameter that is NaN while its memory is freed. See Note [Reads of freed parameters]."""

    def __init__(self, name: str, param: nn.Parameter, view: Tensor) -> None:
        self.name = name
        self.param = param
        self.view = view
        self._filler: Tensor | None = None
        self._version = 0

    @property
    def is_filled(self) -> bool:
        """Whether it is NaN."""
        return self._filler is not None

    def fill(self) -> None:
        """Have a NaN in place of every entry; 0 where the type has no NaN."""
        if self.is_filled:
            return
        # kept: the memory that a script gives the parameter in its place is another as long as it lives
        self._filler = self.view.new_full((), self._value)
        self.param.data = self._filler.expand(self.view.shape)
        self._version = self.param._version

    @property
    def _value(self) -> float:
        dtype = self.view.dtype
        return float("nan") if dtype.is_floating_point or dtype.is_complex else 0

    @property
    def _was_written(self) -> bool:
        """Whether it was written, or has got other memory; writes to its `.data` are not seen."""
        if self._filler is None:
            return False
        memory = self._filler.untyped_storage()._cdata
        is_other = self.param.untyped_storage()._cdata != memory
        return is_other or self.param._version != self._version

    def check_unwritten(self) -> None:
        """Check that it was not written, also by its `.data`, for which the device is waited for.

        Raises:
            PlanError: it was.
        """
        filler = self._filler
        if self._was_written:
            self._reject_write()
        if (
            filler is not None
            and not filler.is_meta
            and not filler.isnan()
            and filler != self._value
        ):
            self._reject_write()

    def restore(self) -> None:
        """Have the memory of the view again.

        Raises:
            PlanError: it was written meanwhile.
        """
        if not self.is_filled:
            return
        was_written = self._was_written
        self.param.data = self.view
        self._filler = None
        if was_written:
            self._reject_write()

    def _reject_write(self) -> NoReturn:
        raise PlanError(
            Fault(
                self.name,
                "was written while its memory is freed, so the values are lost",
                fix="write the shards that net.parameters() has, or load_full_state_dict(state)",
            )
        )
