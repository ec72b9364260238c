"""Vocabulary-parallel embedding and cross entropy equal the whole ones, also where the vocabulary does not divide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.core.axes import span
from weft.models.common.batch import IGNORE, token_batch
from weft.parallel.tensor.vocab import (
    VocabParallelEmbedding,
    VocabParallelLoss,
    vocab_cross_entropy,
)
from weft.testing import run_ranks


@pytest.mark.parametrize("vocab", [8, 11, 5])
@pytest.mark.parametrize("mesh", ["tp2", "tp4", "tp5"])
def test_cross_entropy_of_sharded_logits_is_the_whole_one_forward_and_backward(
    mesh: str, vocab: int
) -> None:
    torch.manual_seed(1)
    random = torch.randn(3, 7, vocab, dtype=torch.float64)
    logits = (30 * random).requires_grad_()
    targets = torch.randint(0, vocab, (3, 7))
    targets[0, 3:] = IGNORE
    targets[2] = IGNORE
    flat_logits = logits.flatten(0, 1)
    want = F.cross_entropy(flat_logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (3 * want).backward()

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        lo, hi = span(vocab, comm.degree("tp"), comm.index("tp"))
        own = logits.detach()[..., lo:hi]
        own_logits = own.clone().requires_grad_()
        loss = vocab_cross_entropy(own_logits, targets, lo=lo, comm=comm, axis="tp")
        (3 * loss).backward()
        return loss.detach(), own_logits.grad

    ranks = run_ranks(mesh, rank)
    for loss, _ in ranks:
        torch.testing.assert_close(loss, want.detach(), rtol=1e-13, atol=0)
    gradient = torch.cat([grad for _, grad in ranks], -1)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-11, atol=1e-15)


def test_cross_entropy_sends_a_few_numbers_a_token_and_no_logits() -> None:
    def rank(comm: Comm) -> dict[str, tuple[int, int]]:
        counter = Counter()
        comm.observers = (counter,)
        logits = torch.zeros(1, 10, 500, requires_grad=True)
        vocab_cross_entropy(
            logits, torch.zeros(1, 10, dtype=torch.int64), lo=500 * comm.rank, comm=comm, axis="tp"
        ).backward()
        return {
            op: (traffic.operations, traffic.payload_bytes)
            for (_, op), traffic in counter.traffic.items()
        }

    want = {"all_reduce": (2, 4 * (10 + 2 * 10))}
    assert run_ranks("tp2", rank) == [want, want]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mesh", ["tp2", "tp4"])
@pytest.mark.parametrize("padding_idx", [None, 0, 4, 9])
def test_embedding_of_a_sharded_table_is_the_whole_one_forward_and_backward(
    mesh: str, sequence: bool, padding_idx: int | None
) -> None:
    torch.manual_seed(2)
    table = nn.Embedding(11, 6, padding_idx=padding_idx).double()
    tokens = torch.randint(0, 11, (3, 8))
    tokens[0, :3] = torch.tensor([0, 4, 9])
    want = table(tokens)
    weights = torch.randn(want.shape, dtype=torch.float64)
    whole_loss = (want * weights).sum()
    whole_loss.backward()

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        degree = comm.degree("tp")
        index = comm.index("tp")
        lo, hi = span(11, degree, index)
        options = {"sequence_parallel": sequence, "dtype": torch.float64}
        cut = VocabParallelEmbedding(11, 6, comm=comm, padding_idx=padding_idx, **options)
        with torch.no_grad():
            cut.weight.copy_(table.weight[lo:hi])
        out = cut(tokens)
        own_weights = weights
        if sequence:
            own_weights = weights.chunk(degree, 1)[index]
        loss = (out * own_weights).sum()
        loss.backward()
        return out.detach(), cut.weight.grad

    ranks = run_ranks(mesh, rank)
    outs = [out for out, _ in ranks]
    whole = torch.cat(outs, 1) if sequence else outs[0]
    assert torch.equal(whole, want.detach())
    gradient = torch.cat([grad for _, grad in ranks])
    torch.testing.assert_close(gradient, table.weight.grad, rtol=1e-12, atol=1e-15)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    torch.manual_seed(3)
    logits = torch.randn(2, 5, 12).bfloat16()
    targets = torch.randint(0, 12, (2, 5))
    want = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    def rank(comm: Comm) -> Tensor:
        lo, hi = span(12, 2, comm.rank)
        return vocab_cross_entropy(logits[..., lo:hi], targets, lo=lo, comm=comm, axis="tp")

    for loss in run_ranks("tp2", rank):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("entry", [-1, 11, 10**9])
def test_an_entry_outside_the_vocabulary_is_an_error_as_on_one_device(entry: int) -> None:
    tokens = torch.tensor([[3, entry]])
    batch = token_batch(torch.zeros_like(tokens), tokens)

    def rank(comm: Comm) -> None:
        with pytest.raises(IndexError, match="a token is outside the vocabulary of 11"):
            VocabParallelEmbedding(11, 6, comm=comm)(tokens)
        loss = VocabParallelLoss(11, comm=comm)
        logits = torch.zeros(1, 2, loss.hi - loss.lo)
        with pytest.raises(IndexError, match="a target is outside the vocabulary of 11"):
            loss(logits, batch)

    run_ranks("tp2", rank)
