"""Exchange of keys and values between the ranks that share a sequence, and of their gradients back; the all-gather one.

The ring is in ring.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis


@dataclass(frozen=True)
class KeyValue:
    """Keys and values (or their gradients) of one rank in one flat buffer; `keys` and `values` are
    views into it.
    """

    buffer: Tensor
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]

    @staticmethod
    def of(k_BSGK: Tensor, v_BSGW: Tensor) -> KeyValue:
        """A copy of both."""
        flat_keys = k_BSGK.reshape(-1)
        flat_values = v_BSGW.reshape(-1)
        return KeyValue(
            torch.cat((flat_keys, flat_values)), tuple(k_BSGK.shape), tuple(v_BSGW.shape)
        )

    @cached_property
    def keys(self) -> Tensor:
        """keys_BSGK."""
        num_keys = prod(self.keys_shape)
        flat = self.buffer[:num_keys]
        return flat.view(self.keys_shape)

    @cached_property
    def values(self) -> Tensor:
        """values_BSGW."""
        num_keys = prod(self.keys_shape)
        flat = self.buffer[num_keys:]
        return flat.view(self.values_shape)

    def with_buffer(self, buffer: Tensor) -> KeyValue:
        """Another buffer with the same shapes."""
        return KeyValue(buffer, self.keys_shape, self.values_shape)

    def zeros(self, dtype: torch.dtype) -> KeyValue:
        """Zeros of another type with the same shapes."""
        return self.with_buffer(torch.zeros_like(self.buffer, dtype=dtype))

    def add(self, gradient: KVGradient) -> None:
        """Add to some columns of both."""
        self.keys[:, gradient.columns] += gradient.dk
        self.values[:, gradient.columns] += gradient.dv


class KVGradient(NamedTuple):
    """Gradients for some columns of a rank's keys and values: dk_BTGK, dv_BTGW."""

    columns: slice
    dk: Tensor
    dv: Tensor


class KVGradAccumulator(Protocol):
    """Sums of the gradients of all ranks' keys and values, on their way to the ranks that hold
    them.
    """

    def add(self, source: int, gradients: Sequence[KVGradient]) -> None:
        """Gradients for the keys and values of rank `source`; called once for each pair that
        `KVExchange.receive` yields.
        """
        ...

    def finish(self) -> KeyValue:
        """The sum over all ranks for this rank's own keys and values."""
        ...


class KVExchange(Protocol):
    """How keys and values are sent between the ranks that share a sequence."""

    @property
    def index(self) -> int:
        """This rank's place on the axis."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks that share a sequence."""
        ...

    def receive(self, own: KeyValue, turns: Sequence[int]) -> Iterator[tuple[int, KeyValue]]:
        """(source, its keys and values), this rank's own first; the next ones are sent while these
        are used.

        `turns` are those of the ring in which any rank computes, see
        `weft.core.sequence.SequenceBlocks`.
        """
        ...

    def accumulator(
        self, own: KeyValue, turns: Sequence[int], dtype: torch.dtype
    ) -> KVGradAccumulator:
        """Sums in this type, at zero, for keys and values shaped like `own`."""
        ...


@dataclass(frozen=True)
class AxisExchange:
    """The ranks of one axis, which share a sequence."""

    comm: Comm
    axis: Axis

    @property
    def index(self) -> int:
        """This rank's place on the axis."""
        return self.comm.index(self.axis)

    @property
    def num_ranks(self) -> int:
        """Ranks that share a sequence."""
        return self.comm.degree(self.axis)


@dataclass(frozen=True)
class AllGatherExchange(AxisExchange):
    """Every rank gathers all keys and values: as many bytes as the ring sends, in one operation.

    They are gathered again for the backward, so that between the two a rank keeps its own part
    only.
    Source: Grattafiori et al. 2024 (LLaMA 3), section 3.3.2.
    """

    def receive(self, own: KeyValue, turns: Sequence[int]) -> Iterator[tuple[int, KeyValue]]:
        """Own keys and values while the others' are sent."""
        if len(turns) == 1:
            yield self.index, own
            return
        work = self.comm.start_all_gather(own.buffer, self.axis)
        yield self.index, own
        buffers = work.wait().chunk(self.num_ranks)
        for source in range(self.num_ranks):
            if source != self.index:
                yield source, own.with_buffer(buffers[source])

    def accumulator(
        self, own: KeyValue, turns: Sequence[int], dtype: torch.dtype
    ) -> ReduceScatterAccumulator:
        """Gradients of all ranks' keys and values side by side."""
        return ReduceScatterAccumulator(self, own, dtype, is_local=len(turns) == 1)


class ReduceScatterAccumulator:
    """This rank's gradients for the keys and values of all ranks, until they are reduced and
    scattered.
    """

    def __init__(
        self, exchange: AllGatherExchange, own: KeyValue, dtype: torch.dtype, *, is_local: bool
    ) -> None:
        self.exchange = exchange
        self.own = own
        self.is_local = is_local
        num_entries = exchange.num_ranks * own.buffer.numel()
        self.buffer = torch.zeros(num_entries, dtype=dtype, device=own.buffer.device)
        self.by_source = [own.with_buffer(part) for part in self.buffer.chunk(exchange.num_ranks)]

    def add(self, source: int, gradients: Sequence[KVGradient]) -> None:
        """Add to the part of rank `source`."""
        for gradient in gradients:
            self.by_source[source].add(gradient)

    def finish(self) -> KeyValue:
        """The sum over all ranks for this rank's own part."""
        if self.is_local:
            return self.by_source[self.exchange.index]
        reduced = self.exchange.comm.reduce_scatter(self.buffer, self.exchange.axis)
        return self.own.with_buffer(reduced)
