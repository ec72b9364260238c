"""Attention of a rank's queries to keys and values that are received block by block, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.core.attention_choice import masked_queries, scored_queries
from weft.core.sequence import BlockMask, SequenceBlocks, zigzag
from weft.models.common import attention_kernels as kernels
from weft.models.common.attention_kernels import (
    BlockGradients,
    Scores,
    attention_device,
    wide_dtype,
)
from weft.models.common.attention_sinks import sinks_gradient, with_sinks
from weft.models.common.attention_spec import AttentionSpec, visible_keys
from weft.parallel.context.kv_exchange import KeyValue, KVExchange, KVGradient


@dataclass(frozen=True)
class BlockAttention:
    """One attention over sequences that are sharded among ranks as `core/sequence.py` says.

    Attributes:
        blocks: which blocks of scores are computed.
        documents: documents_BT of whole sequences; None: every sequence is one document, or the
            mask ignores them.
    """

    exchange: KVExchange
    spec: AttentionSpec
    blocks: SequenceBlocks
    documents: Tensor | None = None

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor) -> Tensor:
        """This rank's q, k and v -> its out_BSHW; differentiable."""
        out = _BlockAttentionFunction.apply(  # type: ignore[no-untyped-call]
            q_BSHK, k_BSGK, v_BSGW, self.spec.sinks, self.spec.head_bias, self
        )
        return cast(Tensor, out)

    def blocks_of(self, source: int, q_BHSK: Tensor) -> Iterator[BlockMask]:
        """Blocks of this rank's queries against the keys of rank `source`, small enough for their
        masks, and for their scores where these are in memory.
        """
        for block in self.blocks.block_masks(self.exchange.index, source):
            yield from block.split(self._most_queries(block, q_BHSK))

    def _most_queries(self, block: BlockMask, q_BHSK: Tensor) -> int:
        """Queries of a block at a time."""
        rows, heads, *_ = q_BHSK.shape
        num_keys: int = block.keys.stop - block.keys.start
        most: int = block.queries.stop - block.queries.start
        device = attention_device(q_BHSK)
        if block.kind == "partial":
            most = min(most, masked_queries(num_keys, device))
        if self.spec.needs_scores:
            most = min(most, scored_queries(rows * heads * num_keys, device))
        return most

    def scores(self, block: BlockMask, source: int, q_BHSK: Tensor) -> Scores:
        """How the scores of a block are computed."""
        distance = None
        factors = None
        if self.spec.head_bias is not None or self.spec.draws is not None:
            queries, keys = self._columns(block, source, q_BHSK.device)
            distance = queries[:, None] - keys
            if self.spec.draws is not None:
                length = self.blocks.length
                factors = partial(self.spec.draws.factors, queries, keys, length=length)
        return Scores(
            self.spec.scale_of(q_BHSK),
            causal=block.kind == "triangle",
            mask=self._mask(block, source, q_BHSK.device) if block.kind == "partial" else None,
            softcap=self.spec.softcap,
            head_bias=self.spec.head_bias,
            distance=distance,
            factors=factors,
        )

    def _mask(self, block: BlockMask, source: int, device: torch.device) -> Tensor | None:
        """True where a query attends to a key, [B or 1, 1, Sq, Sk]."""
        queries, keys = self._columns(block, source, device)
        allowed = visible_keys(self.spec.mask, queries, keys)
        if allowed is not None:
            allowed = allowed[None, None]
        if self.documents is None:
            return allowed
        query_documents = self.documents[:, queries]
        key_documents = self.documents[:, keys]
        is_same = query_documents[:, None, :, None] == key_documents[:, None, None, :]
        if allowed is None:
            return is_same
        return is_same & allowed

    def _columns(
        self, block: BlockMask, source: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Columns of the block's queries and of its keys in the whole sequence."""
        own_columns = self._columns_of(self.exchange.index, device)
        source_columns = self._columns_of(source, device)
        return own_columns[block.queries], source_columns[block.keys]

    def _columns_of(self, index: int, device: torch.device) -> Tensor:
        """Columns of a sequence that a rank holds, in its order."""
        blocks = self.blocks
        parts: list[Tensor] = []
        for span in zigzag(blocks.length, blocks.num_ranks, index):
            columns = torch.arange(span.start, span.stop, device=device)
            parts.append(columns)
        return torch.cat(parts)


class _BlockAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGW: Tensor,
        sinks: Tensor | None,
        head_bias: Tensor | None,
        attention: BlockAttention,
    ) -> Tensor:
        q_BHSK = _swap_heads(q_BSHK)
        own = KeyValue.of(k_BSGK, v_BSGW)
        merged = _MergedBlocks(q_BHSK, width=v_BSGW.shape[-1])
        for received in _received_blocks(attention, own, q_BHSK):
            block = received.block
            q = q_BHSK[:, :, block.queries]
            scores = attention.scores(block, received.source, q)
            out, lse = kernels.attend(q, received.k, received.v, scores)
            merged.add(block.queries, out, lse)
        if sinks is not None:
            merged.out, merged.lse = with_sinks(merged.out, merged.lse, sinks)
        out = merged.out.to(q_BHSK.dtype)
        ctx.save_for_backward(q_BHSK, own.buffer, out, merged.lse, sinks)
        ctx.attention = attention
        ctx.shapes = own.keys_shape, own.values_shape  # not `own`: it holds its buffer
        return _swap_heads(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHW: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSK, buffer, out, lse, sinks = ctx.saved_tensors
        attention: BlockAttention = ctx.attention
        exchange = attention.exchange
        own = KeyValue(buffer, *ctx.shapes)
        grad = _swap_heads(grad_BSHW.contiguous())
        backward = _BackwardPass(attention, q_BHSK, grad, out, lse)
        turns = attention.blocks.ring_turns
        accumulator = exchange.accumulator(own, turns, backward.dq.dtype)
        # Received a second time: kept from the forward they would be keys and values of whole sequences.
        for source, received in exchange.receive(own, turns):
            gradients = backward.run_source(source, received)
            # Before the next turn is asked for: its gradients travel beside the next keys and values.
            accumulator.add(source, gradients)
        own_gradients = accumulator.finish()
        dsinks: Tensor | None = None
        if sinks is not None:
            dsinks = sinks_gradient(sinks, grad, out, lse)
        dtype = q_BHSK.dtype
        return (
            _swap_heads(backward.dq.to(dtype)),
            own_gradients.keys.to(dtype),
            own_gradients.values.to(dtype),
            dsinks,
            backward.head_bias_gradient(),
            None,
        )


class _BackwardPass:
    """Gradients of this rank's queries, summed over the blocks so far, and of each source's keys
    and values.
    """

    def __init__(
        self, attention: BlockAttention, q_BHSK: Tensor, grad: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self.attention = attention
        self.q_BHSK = q_BHSK
        self.grad = grad
        self.out = out
        self.lse = lse
        # Wide until all blocks are added: one rounding, as on one device.
        self.dq = torch.zeros_like(q_BHSK, dtype=wide_dtype(q_BHSK.dtype))
        self.dhead_bias: Tensor | None = None

    def run_source(self, source: int, received: KeyValue) -> list[KVGradient]:
        """The gradients for the keys and values of one source, block by block."""
        gradients: list[KVGradient] = []
        for block in self.attention.blocks_of(source, self.q_BHSK):
            found = self._run_block(block, source, received)
            self.dq[:, :, block.queries] += found.q
            if found.head_bias is not None:
                self._add_head_bias(found.head_bias)
            gradient = KVGradient(block.keys, dk=_swap_heads(found.k), dv=_swap_heads(found.v))
            gradients.append(gradient)
        return gradients

    def _run_block(self, block: BlockMask, source: int, received: KeyValue) -> BlockGradients:
        queries = block.queries
        q = self.q_BHSK[:, :, queries]
        inputs = kernels.Block(
            q,
            _swap_heads(received.keys[:, block.keys]),
            _swap_heads(received.values[:, block.keys]),
        )
        output = kernels.BlockOutput(
            self.grad[:, :, queries], self.out[:, :, queries], self.lse[:, :, queries]
        )
        scores = self.attention.scores(block, source, q)
        return kernels.attend_backward(inputs, output, scores)

    def _add_head_bias(self, gradient: Tensor) -> None:
        if self.dhead_bias is None:
            self.dhead_bias = gradient
        else:
            self.dhead_bias = self.dhead_bias + gradient

    def head_bias_gradient(self) -> Tensor | None:
        """Of the slopes, in their type; None where there are none."""
        head_bias = self.attention.spec.head_bias
        if head_bias is None or self.dhead_bias is None:
            return None
        return self.dhead_bias.to(head_bias.dtype)


class _ReceivedBlock(NamedTuple):
    """A block whose keys k_BGTK and values v_BGTW have arrived from `source`."""

    block: BlockMask
    source: int
    k: Tensor
    v: Tensor


def _received_blocks(
    attention: BlockAttention, own: KeyValue, q_BHSK: Tensor
) -> Iterator[_ReceivedBlock]:
    """The blocks of all sources, as their keys and values arrive."""
    turns = attention.blocks.ring_turns
    for source, received in attention.exchange.receive(own, turns):
        for block in attention.blocks_of(source, q_BHSK):
            keys = received.keys[:, block.keys]
            values = received.values[:, block.keys]
            yield _ReceivedBlock(block, source, k=_swap_heads(keys), v=_swap_heads(values))


class _MergedBlocks:
    """Output and log-sum-exp over the blocks so far: see Note [Blocks add up] in attention_kernels.py.

    The first block of each query lets it see a key.
    """

    out: Tensor
    lse: Tensor

    def __init__(self, q_BHSK: Tensor, *, width: int) -> None:
        self.q_BHSK = q_BHSK
        self.width = width
        self.dtype = wide_dtype(q_BHSK.dtype)
        self.is_empty = True

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the results of a block, of some queries."""
        num_queries = self.q_BHSK.shape[2]
        out = out.to(self.dtype)
        # Taken over without a copy; later blocks are merged into the kernel's own output.
        if self.is_empty and out.shape[2] == num_queries:
            self.out = out
            self.lse = lse
            self.is_empty = False
            return
        if self.is_empty:
            self._allocate()
        merged_out = self.out[:, :, queries]
        merged_lse = self.lse[:, :, queries]
        weight = torch.sigmoid(lse - merged_lse)
        merged_out.lerp_(out, weight.unsqueeze(-1))
        merged_lse.copy_(torch.logaddexp(merged_lse, lse))

    def _allocate(self) -> None:
        """Results without any key."""
        q = self.q_BHSK
        *lse_shape, _ = q.shape
        out_shape = (*lse_shape, self.width)
        self.out = q.new_zeros(out_shape, dtype=self.dtype)
        self.lse = q.new_full(lse_shape, kernels.NO_WEIGHT, dtype=self.dtype)
        self.is_empty = False


def _swap_heads(x: Tensor) -> Tensor:
    """x_BSHK -> x_BHSK, and back."""
    return x.transpose(1, 2)
