"""Dropout by counter: whether an entry is dropped is a function of its sequence's key, its call and its place, on any layout.

Note [Counter-based dropout]
    The mask of one call is a function of

        key      of the sequence: a hash of the run's seed and the sequence's number in the run, which
                 counts steps and samples, not ranks or micro-batches (`Batch.draw_keys`)
        call     name of the block, and number of the call within its forward
        entry    place within the sequence's own part of the tensor, in row-major order, as one device
                 holds it: [column, feature] of x_BSD, [head, query, key] of the weights of attention

    so every rank computes the masks of what it holds, the mask of a repeated forward is the same,
    and nothing is stored: the backward computes the mask again. What is kept is multiplied by
    1 / (1 - p), as torch does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from weft.core.entry_places import DimEntries
from weft.models.common.counter_hash import GOLDEN_64, hash_64, hash_columns, row_keys_of, signed

CHUNK_ENTRIES = {"cpu": 2**16, "cuda": 2**24}
"""Entries that are computed at a time: on a CPU the temporaries stay in the cache."""


def call_key(block: str, call: int) -> int:
    """A key of 63 bits for a call within the forward of a block."""
    digest = hashlib.sha256(f"dropout:{block}:{call}".encode()).digest()
    return signed(int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True)
class DropoutDraws:
    """The random numbers of one call, for the entries that a rank holds.

    Attributes:
        p: probability that an entry is dropped.
        sequence_keys: int64 [B].
        call: key of the call.
        dims: the entries of each dim after the first one.
    """

    p: float
    sequence_keys: Tensor
    call: int
    dims: tuple[DimEntries, ...]

    def factors(self, dtype: torch.dtype) -> Tensor:
        """What entries are multiplied with, 0 or 1 / (1 - p): [B, *dims]."""
        rows, columns = self._rows_and_columns()
        return self._by_dims(self.factors_of(rows, columns, dtype))

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Numbers between -1 and 1, each as likely: [B, *dims]."""

        def fill(bits: Tensor, out: Tensor) -> None:
            out.copy_(bits).add_(0.5).mul_(2.0**-31)

        rows, columns = self._rows_and_columns()
        return self._by_dims(self._filled(rows, columns, dtype, fill))

    def factors_of(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """The factors of rows and columns of these numbers: [B, rows, columns]."""
        if self.p >= 1:
            shape = (len(self.sequence_keys), len(rows), len(columns))
            return torch.zeros(shape, dtype=dtype, device=rows.device)
        scale = _scale(self.p, dtype)
        # bits are signed: the smallest share p of all of them is dropped
        least = round(self.p * 2**32) - 2**31

        def fill(bits: Tensor, out: Tensor) -> None:
            torch.mul(bits >= least, scale, out=out)

        return self._filled(rows, columns, dtype, fill)

    def _filled(
        self,
        rows: Tensor,
        columns: Tensor,
        dtype: torch.dtype,
        fill: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        """[B, rows, columns] of numbers that `fill` makes of 32 bits each, in its second argument."""
        # hashed before rows are mixed in: neighbouring sequences and calls would otherwise share rows
        keys = hash_64(self.sequence_keys * GOLDEN_64 + self.call)
        row_keys = row_keys_of(rows, keys[:, None]).flatten(1).unsqueeze(-1)
        out = torch.empty((row_keys.shape[1], len(columns)), dtype=dtype, device=rows.device)
        for chunk in _chunks(out):
            fill(hash_columns(columns, row_keys[:, chunk]), out[chunk])
        return out.view(len(keys), len(rows), len(columns))

    def _rows_and_columns(self) -> tuple[Tensor, Tensor]:
        """The numbers of the rows of all dims but the last one, and of its columns."""
        *row_dims, column_dim = self.dims or (DimEntries.whole(1),)
        device = self.sequence_keys.device
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        for dim in row_dims:
            rows = (rows[:, None] * dim.length + _places(dim, device)).flatten()
        return rows, _places(column_dim, device)

    def _by_dims(self, found: Tensor) -> Tensor:
        return found.reshape(len(self.sequence_keys), *map(_num_entries, self.dims))


def _num_entries(dim: DimEntries) -> int:
    return sum(map(len, dim.spans))


def _places(dim: DimEntries, device: torch.device) -> Tensor:
    spans = [
        torch.arange(span.start, span.stop, dtype=torch.int64, device=device) for span in dim.spans
    ]
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def _scale(p: float, dtype: torch.dtype) -> Tensor:
    """1 / (1 - p) in this type, as torch computes it; on the CPU, from where a scalar may be used."""
    return torch.ones((), dtype=dtype).div_(1 - p)


def _chunks(matrix: Tensor) -> Iterator[slice]:
    """Runs of rows that are computed at a time."""
    num_rows, num_columns = matrix.shape
    most = CHUNK_ENTRIES.get(matrix.device.type, matrix.numel())
    at_a_time = max(1, most // max(num_columns, 1))
    for start in range(0, num_rows, at_a_time):
        yield slice(start, start + at_a_time)


def drop(x: Tensor, draws: DropoutDraws, shape: Sequence[int]) -> Tensor:
    """x_B... with some entries 0, and the others scaled; a function of torch to modes, which may
    repeat it.

    Args:
        shape: of the factors, which broadcasts to that of x.
    """
    if has_torch_function_unary(x):
        out: Tensor = handle_torch_function(drop, (x,), x, draws, shape)
        return out
    return times_factors(x, lambda dtype: draws.factors(dtype).view(shape))


def times_factors(x: Tensor, factors: Callable[[torch.dtype], Tensor]) -> Tensor:
    """x times what `factors` returns for its type, which broadcasts to x; the backward computes the
    factors again.
    """
    product: Tensor = _TimesFactors.apply(x, factors)  # type: ignore[no-untyped-call]
    return product


class _TimesFactors(torch.autograd.Function):
    """Saves nothing. Its backward is the same function of the gradient, which may be differentiated
    again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.factors = factors
        if has_no_memory(x):
            return x * 1.0
        return x * factors(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return times_factors(gradient, ctx.factors), None


def has_no_memory(x: Tensor) -> bool:
    """Whether a tensor has a shape and no values: on the meta device, or a fake one."""
    return x.is_meta or hasattr(x, "fake_mode")


@dataclass(frozen=True)
class AttentionDraws:
    """The random numbers of one call of attention: of its weights [B, H, S, T].

    Attributes:
        heads: query heads of this rank.
        draws: p, keys and call; its dims are not used.
    """

    heads: DimEntries
    draws: DropoutDraws

    def select_heads(self, chosen: slice) -> AttentionDraws:
        """The same for some of the query heads."""
        return replace(self, heads=self.heads.select(chosen))

    def select_rows(self, chosen: slice) -> AttentionDraws:
        """The same for some of the sequences."""
        keys = self.draws.sequence_keys[chosen]
        return replace(self, draws=replace(self.draws, sequence_keys=keys))

    def of_columns(self, columns_S: Tensor) -> Callable[[torch.dtype], Tensor]:
        """What the weights of whole sequences are multiplied with, [B, H, S, S], by number type."""
        return partial(self.factors, columns_S, columns_S, length=len(columns_S))

    def factors(self, queries: Tensor, keys: Tensor, dtype: torch.dtype, *, length: int) -> Tensor:
        """What weights are multiplied with, [B, H, queries, keys].

        Args:
            queries, keys: their columns in the sequence.
            length: of the sequence.
        """
        heads = _places(self.heads, queries.device)
        rows = (heads[:, None] * length + queries).flatten()
        found = self.draws.factors_of(rows, keys, dtype)
        by_head: Tensor = found.unflatten(1, (len(heads), -1))
        return by_head


def attention_draws(q_BSHK: Tensor, p: float) -> AttentionDraws | None:
    """The random numbers of one attention; those of torch's generator outside of a run, None where
    nothing is dropped.
    """
    if has_torch_function_unary(q_BSHK):
        found: AttentionDraws | None = handle_torch_function(attention_draws, (q_BSHK,), q_BSHK, p)
        return found
    batch_size, _, num_heads, _ = q_BSHK.shape
    keys = torch.randint(-(2**63), 2**63 - 1, (batch_size,), device=q_BSHK.device)
    return AttentionDraws(DimEntries.whole(num_heads), DropoutDraws(p, keys, 0, ()))


def uniform_like(x: Tensor) -> Tensor:
    """Numbers between 0 and 1 in the shape of x, whose first dim counts sequences, or tokens by
    sequences; those of torch's generator outside of a run.
    """
    if has_torch_function_unary(x):
        out: Tensor = handle_torch_function(uniform_like, (x,), x)
        return out
    return torch.rand_like(x)


def drop_path(x: Tensor, p: float, training: bool = True) -> Tensor:
    """x_B... with all entries of a sequence 0 with probability p, and those of others divided by
    1 - p: stochastic depth (Huang et al. 2016), for the branch beside a residual.

    A training run of weft drops the same sequences on any layout; elsewhere torch's generator
    decides.
    """
    if has_torch_function_unary(x):
        out: Tensor = handle_torch_function(drop_path, (x,), x, p, training)
        return out
    ones = x.new_ones((x.shape[0], *[1] * (x.dim() - 1)))
    factors = F.dropout(ones, p, training)
    return torch.mul(x, factors)


class DropPath(nn.Module):
    """`drop_path` as a module: drops nothing in evaluation."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
