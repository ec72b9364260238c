"""Ring attention: keys and values pass from rank to rank around a ring while each rank attends to those that it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.hop import MessagePair, start_hop
from weft.comm.transport import Work
from weft.core.attention_mask import AttentionMask
from weft.core.mesh import Axis
from weft.core.sequence import SequenceBlocks
from weft.errors import Fault, PlanError
from weft.models.common.attention_spec import AttentionSpec
from weft.parallel.context.blocks import BlockAttention
from weft.parallel.context.documents import document_ranges, gather_documents
from weft.parallel.context.kv_exchange import AxisExchange, KeyValue, KVGradient
from weft.parallel.cp import AXIS as CP

# Note [Two rings]
# Four ranks; at turn t rank i holds the keys and values of rank i - t, and passes them on while it computes:
#
#     turn            0     1     2     3                 what rank 0 holds: 0 3 2 1
#     keys, values    s  -> . ->  . ->  .                 c - 1 hops, forward and again backward
#     gradients             s  -> . ->  . -> s            c - 1 hops: they start one turn late, at the first rank that is
#                                                         not the source, and are added there to what it computed itself
#
# So a forward sends (c-1) x 2(s/c) b kv entries a rank and a backward twice that (gradients of 16-bit types are sent
# in float32: their sums are made on the way). Where a mask leaves turns out (Note [Skipped blocks] in core/sequence.py), one
# hop goes over several ranks at once, and there are as many hops as turns with work besides turn 0.


@dataclass(frozen=True)
class RingExchange(AxisExchange):
    """Keys and values around the ring of one axis."""

    def receive(self, own: KeyValue, turns: Sequence[int]) -> Iterator[tuple[int, KeyValue]]:
        """Own keys and values, then those of the ranks before, at each turn with work."""
        held = own
        for turn, next_turn in itertools.zip_longest(turns, turns[1:]):
            hop: Hop | None = None
            if next_turn is not None:
                # Under way while the caller computes with the same keys and values, which it may read only.
                hop = Hop(self, held, step=next_turn - turn)
            source = (self.index - turn) % self.num_ranks
            yield source, held
            if hop is not None:
                # From here on what was passed on is freed, or is the caller's again.
                held = hop.wait()

    def accumulator(
        self, own: KeyValue, turns: Sequence[int], dtype: torch.dtype
    ) -> RingAccumulator:
        """Gradients that follow the keys and values around the ring."""
        return RingAccumulator(self, own, turns, dtype)


class Hop:
    """A message to the rank `step` places on and one from the rank `step` places before, in flight
    from now on.

    Of two ranks the next one is the one before: one exchange does for both messages, and does not
    wait until the other side is ready to receive.
    """

    def __init__(self, ring: RingExchange, sent: KeyValue, *, step: int = 1) -> None:
        self.sent = sent
        self.work: Work | MessagePair
        if ring.num_ranks == 2:
            self.work = _start_exchange(ring, sent)
        else:
            received = torch.empty_like(sent.buffer)
            self.work = start_hop(ring.comm, ring.axis, sent.buffer, received, step=step)

    def wait(self) -> KeyValue:
        """What was received."""
        return self.sent.with_buffer(self.work.wait())


def _start_exchange(ring: RingExchange, sent: KeyValue) -> Work:
    num_entries = sent.buffer.numel()
    sizes = (0, num_entries) if ring.index == 0 else (num_entries, 0)
    return ring.comm.start_all_to_all(sent.buffer, ring.axis, send_sizes=sizes, recv_sizes=sizes)


class RingAccumulator:
    """Gradients that follow their keys and values, see Note [Two rings]."""

    def __init__(
        self, ring: RingExchange, own: KeyValue, turns: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.ring = ring
        self.own = own.zeros(dtype)
        self.hop: Hop | None = None
        stops = (*turns[1:], ring.num_ranks)
        self.steps = [after - before for before, after in pairwise(stops)]

    def add(self, source: int, gradients: Sequence[KVGradient]) -> None:
        """Add to what came with the keys and values, and send it on."""
        is_own = source == self.ring.index
        if is_own:
            held = self.own
        elif self.hop is None:
            held = self.own.zeros(self.own.buffer.dtype)
        else:
            held = self.hop.wait()
        for gradient in gradients:
            held.add(gradient)
        # This rank's own gradients stay: those of the others arrive at the end.
        if not is_own:
            step = self.steps.pop(0)
            self.hop = Hop(self.ring, held, step=step)

    def finish(self) -> KeyValue:
        """The sum of what the other ranks computed, when it has arrived, and of what this rank
        computed.
        """
        if self.hop is not None:
            self.own.buffer.add_(self.hop.wait().buffer)
        return self.own


def ring_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGW: Tensor,
    comm: Comm,
    axis: Axis = CP,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over sequences that are sharded over `axis`, exact; every rank of the axis calls
    it, and its backward.

    Keys and values are sent around the ring while each rank attends to those that it holds; only
    they are sent, H / G times less than queries would. With c ranks, causal, rank i holds chunks i
    and 2c-1-i of the 2c equal chunks of each sequence (`weft.core.sequence.zigzag`), so that all
    have as much to do; bidirectional without window and documents, any cut into equal parts will
    do. Blocks that window or documents hide are skipped.

    Args:
        q_BSHK: this rank's S columns, of B sequences, H heads of size K.
        k_BSGK: this rank's keys, G heads that divide H.
        v_BSGW: this rank's values, G heads; W may differ from K.
        comm: this rank's collectives.
        causal: a token attends to itself and those before it; else all.
        window: a token attends to those at a distance below this; None: any.
        documents: documents_BS, whole numbers for this rank's columns: tokens attend to those of
            their own document only.
        scale: factor of q k^T; 1 / sqrt(K) where it is None.

    Returns:
        out_BSHW, this rank's columns, in the type of q. Sums over blocks are made in float32, in
        float64 for float64.

    Raises:
        PlanError: shapes that do not fit together, or an odd number of columns that must be two
            chunks.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers; Brandon et al. 2023,
        Striped Attention.
    """
    num_ranks = comm.degree(axis)
    mask = AttentionMask(causal=causal, window=window)
    _check_shapes(q_BSHK, k_BSGK, v_BSGW)
    is_zigzag = causal or window is not None or documents is not None
    if is_zigzag and num_ranks > 1 and q_BSHK.shape[1] % 2:
        need = f"an even number of columns a rank: 2 of the {2 * num_ranks} chunks of a sequence"
        got = _shapes_text(q_BSHK, k_BSGK, v_BSGW)
        raise PlanError(Fault("ring_attention", "an odd number of columns", got, need))
    whole_documents = None if documents is None else gather_documents(documents, comm, axis)
    blocks = SequenceBlocks(
        num_ranks * q_BSHK.shape[1],
        num_ranks,
        mask,
        documents=None if whole_documents is None else document_ranges(whole_documents, num_ranks),
        has_documents=documents is not None,
    )
    spec = AttentionSpec(mask, scale)
    attention = BlockAttention(RingExchange(comm, axis), spec, blocks, whole_documents)
    return attention(q_BSHK, k_BSGK, v_BSGW)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    got = _shapes_text(q, k, v)
    num_dims = {x.dim() for x in (q, k, v)}
    batches_and_columns = {x.shape[:2] for x in (q, k, v)}
    if num_dims != {4} or len(batches_and_columns) > 1:
        fault = Fault(
            "ring_attention",
            "columns differ",
            got=got,
            need="q_BSHK, k_BSGK, v_BSGW of the same B and S",
        )
        raise PlanError(fault)
    _, _, num_heads, q_size = q.shape
    _, _, num_k_heads, k_size = k.shape
    _, _, num_v_heads, _ = v.shape
    heads_fit = num_k_heads == num_v_heads and num_heads % num_k_heads == 0
    if not heads_fit or q_size != k_size:
        fault = Fault(
            "ring_attention",
            "heads do not fit together",
            got=got,
            need="as many heads in k as in v, a divisor of those in q; q and k of one head size",
        )
        raise PlanError(fault)


def _shapes_text(q: Tensor, k: Tensor, v: Tensor) -> str:
    words: list[str] = []
    for name, x in {"q": q, "k": k, "v": v}.items():
        words.append(f"{name}{list(x.shape)}")
    return ", ".join(words)
