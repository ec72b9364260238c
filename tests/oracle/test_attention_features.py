"""Attention features (window, prefix, documents, soft-cap, sinks, bias, ...) equal their formulas in every implementation.

The fused, ring, all-gather and Ulysses implementations: forward and all gradients, in float64 within
1e-9; hidden blocks are skipped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.attention import attend_across
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.core.attention_mask import CAUSAL, AttentionMask
from weft.core.sequence import Context, zigzag
from weft.models.common import attention_kernels as kernels
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch, token_batch
from weft.parallel.context.attend import VARIANTS
from weft.testing import run_ranks

TOLERANCE = 1e-9
B, H, G, K, LENGTH = 2, 12, 12, 6, 24


@dataclass(frozen=True)
class Features:
    """What one attention requires."""

    mask: AttentionMask = CAUSAL
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    head_bias: bool = False
    packed: bool = False

    def attend_arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(7)
        sinks = torch.randn(H, generator=generator, dtype=torch.float64)
        slopes = torch.rand(H, generator=generator, dtype=torch.float64)
        return {
            "mask": self.mask,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": nn.Parameter(sinks) if self.sinks else None,
            "head_bias": nn.Parameter(slopes) if self.head_bias else None,
        }


FEATURES = {
    "causal": Features(),
    "bidirectional": Features(AttentionMask(causal=False)),
    "window of one": Features(AttentionMask(window=1)),
    "window within a chunk": Features(AttentionMask(window=2)),
    "window over chunks": Features(AttentionMask(window=7)),
    "window beyond the sequence": Features(AttentionMask(window=100)),
    "bidirectional window": Features(AttentionMask(causal=False, window=4)),
    "prefix": Features(AttentionMask(prefix=5)),
    "prefix and window": Features(AttentionMask(prefix=9, window=6)),
    "documents": Features(packed=True),
    "documents ignored": Features(AttentionMask(documents=False), packed=True),
    "documents and window": Features(AttentionMask(window=5), packed=True),
    "bidirectional documents": Features(AttentionMask(causal=False), packed=True),
    "scale": Features(scale=0.3),
    "softcap": Features(softcap=1.5),
    "sinks": Features(sinks=True),
    "head bias": Features(head_bias=True),
    "gpt-oss layer": Features(AttentionMask(window=4), sinks=True, packed=True),
    "gemma layer": Features(AttentionMask(window=4), scale=0.4, softcap=2.0),
    "all at once": Features(
        AttentionMask(window=9, prefix=3), 0.7, 1.5, sinks=True, head_bias=True, packed=True
    ),
}


@dataclass(frozen=True)
class Problem:
    """q, k, v, the gradient of out, and the documents of whole sequences."""

    given: tuple[Tensor, ...]
    grad: Tensor
    batch: Batch


def problem(features: Features) -> Problem:
    generator = torch.Generator().manual_seed(1)
    sizes = (H, G, G, H)
    q, k, v, grad = (
        torch.randn(B, LENGTH, n, K, generator=generator, dtype=torch.float64) for n in sizes
    )
    tokens = torch.zeros(B, LENGTH, dtype=torch.int64)
    documents = (torch.rand(B, LENGTH, generator=generator) < 0.15).cumsum(1)
    batch = replace(token_batch(tokens, tokens), documents=documents if features.packed else None)
    return Problem((q, k, v), grad, batch)


def formula(features: Features) -> tuple[Tensor, ...]:
    """Output and all gradients, from the definitions: every pair of columns by itself."""
    given = problem(features)
    q, k, v = (x.clone().requires_grad_() for x in given.given)
    arguments = features.attend_arguments()
    scale = features.scale or 1 / math.sqrt(K)
    scores = torch.einsum("bqhk,bthk->bhqt", q, k) * scale
    if features.softcap:
        scores = features.softcap * (scores / features.softcap).tanh()
    if features.head_bias:
        columns = torch.arange(LENGTH)
        distances = columns[None, :] - columns[:, None]
        slopes = arguments["head_bias"][:, None, None]
        scores = scores + slopes * distances
    weights = torch.where(allowed_pairs(features, given), scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if features.sinks:
        total = total + arguments["sinks"][:, None, None].exp()
    out = torch.einsum("bhqt,bthk->bqhk", weights / total, v)
    learned = [x for x in (arguments["sinks"], arguments["head_bias"]) if x is not None]
    gradients = torch.autograd.grad(out, [q, k, v, *learned], given.grad)
    return (out.detach(), *gradients)


def allowed_pairs(features: Features, given: Problem) -> Tensor:
    """Whether each query of a sequence may attend to each key, [B, 1, query, key]."""
    rows = []
    for query in range(LENGTH):
        rows.append([features.mask.allows(query, key) for key in range(LENGTH)])
    allowed = torch.tensor(rows).expand(B, 1, LENGTH, LENGTH)
    if not (features.packed and features.mask.documents):
        return allowed
    documents = given.batch.documents
    of_query = documents[:, None, :, None]
    of_key = documents[:, None, None, :]
    return allowed & (of_query == of_key)


def results(attend: Attend, given: Problem, batch: Batch) -> tuple[Tensor, ...]:
    own = [x.clone().requires_grad_() for x in given.given]
    out = attend(*own, batch)
    gradients = torch.autograd.grad(out, [*own, *attend.parameters()], given.grad)
    return (out.detach(), *gradients)


def shard(x: Tensor, comm: Comm) -> Tensor:
    spans = zigzag(x.shape[1], comm.degree("cp"), comm.index("cp"))
    parts = [x[:, span.start : span.stop] for span in spans]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", FEATURES)
def test_fused_attention_computes_the_formula(name: str) -> None:
    features = FEATURES[name]
    given = problem(features)
    attend = Attend(**features.attend_arguments())
    found = results(attend, given, given.batch)
    for mine, right in zip(found, formula(features), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=TOLERANCE)


def triples() -> Iterator[Any]:
    """Every feature with every degree and every variant, each pair by default, the others in `make
    slow`.
    """
    degrees = (2, 3, 4)
    for row, name in enumerate(FEATURES):
        for column, (variant, degree) in enumerate(itertools.product(VARIANTS, degrees)):
            place = column // len(degrees) + column % len(degrees)
            is_default = (row + place) % len(degrees) == 0
            yield pytest.param(name, variant, degree, marks=() if is_default else pytest.mark.slow)


@pytest.mark.parametrize(("name", "variant", "degree"), list(triples()))
def test_attention_across_cp_computes_the_formula(name: str, variant: Context, degree: int) -> None:
    features = FEATURES[name]
    whole = problem(features)
    expected = formula(features)

    def rank(comm: Comm) -> float:
        given = tuple(shard(x, comm) for x in whole.given)
        grad = shard(whole.grad, comm)
        own = Problem(given, grad, whole.batch)
        batch = whole.batch.columns(index=comm.index("cp"), degree=degree)
        attend = attend_across(variant, comm, **features.attend_arguments())
        out, dq, dk, dv, *learned = results(attend, own, batch)
        found = [out, dq, dk, dv]
        found.extend(comm.all_reduce(x, "cp") for x in learned)
        right = [shard(x, comm) for x in expected[:4]]
        right.extend(expected[4:])
        worst = 0.0
        for mine, theirs in zip(found, right, strict=True):
            difference = (mine - theirs).abs().max()
            worst = max(worst, difference.item())
        return worst

    assert max(run_ranks(f"cp{degree}", rank)) < TOLERANCE


def visible_pairs(features: Features) -> int:
    documents = problem(features).batch.documents
    pairs = 0
    for row in range(B):
        for i in range(LENGTH):
            for j in range(LENGTH):
                is_same = documents is None or documents[row, i] == documents[row, j]
                pairs += bool(features.mask.allows(i, j) and is_same)
    return pairs


class ScoreCounter:
    """Replaces `kernels.attend`: counts the scores that blocks compute, of all ranks."""

    def __init__(self) -> None:
        self.right = kernels.attend
        self.num_scores = 0
        self.num_blocks = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: kernels.Scores
    ) -> tuple[Tensor, Tensor]:
        batch_size, _, num_heads, _ = q.shape
        self.num_scores += batch_size * num_heads * k.shape[2]
        self.num_blocks += 1
        return self.right(q, k, v, scores)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScoreCounter]:
    found = ScoreCounter()
    monkeypatch.setattr(kernels, "attend", found)
    return found


@pytest.mark.parametrize(
    ("variant", "window", "most"), [("ring", 3, 0.3), ("allgather", 3, 0.3), ("ring", 6, 0.45)]
)
def test_a_window_computes_no_block_that_it_hides(
    variant: Context, window: int, most: float, counter: ScoreCounter
) -> None:
    """Against the causal scores of the whole sequence; `most` covers the masked corners of narrowed
    blocks.
    """
    features = Features(AttentionMask(window=window))
    whole = problem(features)

    def rank(comm: Comm) -> None:
        own = [shard(x, comm) for x in whole.given]
        batch = whole.batch.columns(index=comm.index("cp"), degree=4)
        attend_across(variant, comm, **features.attend_arguments())(*own, batch)

    run_ranks("cp4", rank)
    causal = B * LENGTH * (LENGTH + 1) // 2
    assert visible_pairs(features) <= counter.num_scores < most * causal * 2


@pytest.mark.parametrize("variant", ["ring", "allgather"])
def test_documents_skip_the_blocks_of_other_documents(
    variant: Context, counter: ScoreCounter
) -> None:
    """Four documents of two chunks each: a chunk is computed with itself and at most one more, not
    with the other six.
    """
    documents = torch.arange(LENGTH).div(6, rounding_mode="floor").expand(B, -1)
    whole = problem(Features())
    batch = replace(whole.batch, documents=documents)

    def rank(comm: Comm) -> None:
        own = [shard(x, comm) for x in whole.given]
        own_batch = batch.columns(index=comm.index("cp"), degree=4)
        attend_across(variant, comm)(*own, own_batch)

    run_ranks("cp4", rank)
    assert counter.num_blocks == 8 + 4, (
        "8 chunks with themselves, the second chunk of each document with its first"
    )
    assert counter.num_scores == B * 12 * 3 * 3


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (3, 2), (5, 4), (24, 5)])
def test_the_ring_sends_only_to_turns_with_work(window: int, hops: int) -> None:
    """Six ranks, chunks of 2: a window of one chunk needs turns 1 and 5, two hops in place of five."""
    features = Features(AttentionMask(window=window))
    whole = problem(features)

    def rank(comm: Comm) -> int:
        counted = Counter()
        own = [shard(x, comm) for x in whole.given]
        batch = whole.batch.columns(index=comm.index("cp"), degree=6)
        attend = attend_across("ring", comm, **features.attend_arguments())
        comm.observers = (counted,)
        attend(*own, batch)
        return counted.total().sent_bytes

    one_hop = 8 * B * (LENGTH // 6) * 2 * G * K
    assert run_ranks("cp6", rank) == [hops * one_hop] * 6
