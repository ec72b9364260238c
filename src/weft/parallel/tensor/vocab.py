"""Vocabulary-parallel embedding and cross entropy: rows of the vocabulary are sharded over tp.

Note [Uneven vocabulary]
    A vocabulary that tp does not divide is sharded into parts whose lengths differ by at most one.
    No rank holds a row that does not exist, so there is nothing to pad, nothing to mask in the loss
    and nothing to strip from a checkpoint.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.comm.comm import Comm
from weft.core.axes import span
from weft.core.mesh import Axis, axis_names
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.embedding_noise import NOISE, noise_of, plus_noise
from weft.models.common.head_output import check_within
from weft.models.common.layers import Loss
from weft.models.common.preference import REQUIREMENT, PreferenceLoss
from weft.models.common.seam import check_replaceable
from weft.parallel.autograd.holders import Holders
from weft.parallel.autograd.rank_part import MarkedLayer, plain
from weft.parallel.tensor.region import Region
from weft.parallel.tp import AXIS


class VocabParallelEmbedding(MarkedLayer):
    """Rows of the table are sharded over `axis`; each rank looks up its own, the sum over ranks is
    the embedding.

    tokens_BS (int64, the same on every rank of the group) -> x_BSD; with `sequence_parallel` this
    rank's part along the sequence.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """

    left_out = ("forward",)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        comm: Comm,
        padding_idx: int | None = None,
        axis: Axis = AXIS,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.region = Region(comm, axis, sequence_parallel)
        self.num_embeddings = num_embeddings
        self.padding_idx = padding_idx
        self.lo, hi = span(num_embeddings, comm.degree(axis), comm.index(axis))
        self.weight = nn.Parameter(
            torch.empty(hi - self.lo, embedding_dim, device=device, dtype=dtype)
        )
        if not self.weight.is_meta:
            nn.init.normal_(self.weight)
        self.mark(("weight",), Holders(comm, axis_names(axis), 0, (num_embeddings,)))

    @classmethod
    def from_embedding(cls, module: nn.Embedding, region: Region) -> VocabParallelEmbedding:
        """The embedding whose table, sharded already, `module` holds."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.region = region
        self.num_embeddings = module.num_embeddings
        self.padding_idx = module.padding_idx
        self.weight = cast(nn.Parameter, module.weight)
        vars(self)[NOISE] = noise_of(module)
        degree = region.comm.degree(region.axis)
        index = region.comm.index(region.axis)
        self.lo, _ = span(module.num_embeddings, degree, index)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens_BS -> x_BSD.

        Raises:
            IndexError: a token is outside the vocabulary (on a CPU; on a GPU a device assertion).
        """
        check_within(tokens, self.num_embeddings, "a token")
        num_local = self.weight.shape[0]
        local = tokens - self.lo
        is_local = (local >= 0) & (local < num_local)
        index = torch.where(is_local, local, 0)
        padding = None if self.padding_idx is None else self.padding_idx - self.lo
        if padding is not None and not 0 <= padding < num_local:
            padding = None  # the row of another rank
        rows = nn.functional.embedding(index, plain(self.weight), padding)
        rows = rows * is_local.unsqueeze(-1)
        return plus_noise(self, self.region.leave(rows))


class VocabParallelLoss(nn.Module):
    """Sum of cross entropies where each rank holds the logits of its part of the vocabulary.

    Two all-reduces of one number a token (largest logit; sum of exponentials with the target's
    logit) instead of a gather of all logits. Every rank of the group gets the same sum.
    """

    supports = frozenset({"cross_entropy"})
    takes_token_losses = True
    left_out = ("forward",)

    def __init__(self, vocab: int, *, comm: Comm, axis: Axis = AXIS) -> None:
        super().__init__()
        self.comm = comm
        self.axis = axis
        self.vocab = vocab
        degree = comm.degree(axis)
        self.lo, self.hi = span(vocab, degree, comm.index(axis))

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        """logits_BSV (this rank's part of V), targets_BS -> scalar sum over the targets that count.

        Raises:
            IndexError: a target that counts is outside the vocabulary (on a CPU; on a GPU a device
                assertion).
        """
        if logits.dim() == batch.targets.dim():
            return logits.sum()  # losses_BS of a head that computes them, equal on every rank
        counted = torch.where(batch.targets == IGNORE, 0, batch.targets)
        check_within(counted, self.vocab, "a target")
        return vocab_cross_entropy(
            logits, batch.targets, lo=self.lo, comm=self.comm, axis=self.axis
        )


class VocabParallelPreferenceLoss(PreferenceLoss):
    """The loss of preference pairs where each rank holds the logits of its part of the vocabulary."""

    supports = frozenset({REQUIREMENT})
    takes_token_losses = True

    def __init__(self, loss: PreferenceLoss, vocab: int, *, comm: Comm, axis: Axis = AXIS) -> None:
        super().__init__(loss.dpo)
        self.position_sum = loss.position_sum
        self.comm = comm
        self.axis = axis
        self.lo, _ = span(vocab, comm.degree(axis), comm.index(axis))

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits_BSV (this rank's part of V), targets_BS -> losses_BS, the same on every rank."""
        if logits.dim() == targets.dim():
            return logits
        return vocab_token_losses(logits, targets, lo=self.lo, comm=self.comm, axis=self.axis)


def vocab_parallel_loss(loss: Loss, vocab: int, *, comm: Comm, key: str) -> nn.Module:
    """The loss of the same kind for logits that are sharded along the vocabulary.

    Args:
        key: path of the loss, for messages.

    Raises:
        PlanError: a loss of another kind.
    """
    is_preference = isinstance(loss, PreferenceLoss)
    kind: type[VocabParallelLoss] | type[VocabParallelPreferenceLoss] = VocabParallelLoss
    if is_preference:
        kind = VocabParallelPreferenceLoss
    check_replaceable(
        loss,
        PreferenceLoss if is_preference else Loss,
        name="the vocabulary-parallel loss",
        supports=kind.supports,
        key=key,
    )
    if isinstance(loss, PreferenceLoss):
        return VocabParallelPreferenceLoss(loss, vocab, comm=comm)
    return VocabParallelLoss(vocab, comm=comm)


def vocab_cross_entropy(
    logits: Tensor, targets: Tensor, *, lo: int, comm: Comm, axis: Axis
) -> Tensor:
    """Sum over counted targets of -log softmax; `logits[..., v]` belongs to vocabulary entry `lo +
    v`.
    """
    return vocab_token_losses(logits, targets, lo=lo, comm=comm, axis=axis).sum()


def vocab_token_losses(
    logits: Tensor, targets: Tensor, *, lo: int, comm: Comm, axis: Axis
) -> Tensor:
    """losses_BS: -log softmax of each target, 0 where it does not count; as
    `vocab_cross_entropy`.
    """
    losses: Tensor = _VocabCrossEntropy.apply(logits, targets, lo, comm, axis)  # type: ignore[no-untyped-call]
    return losses


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, lo: int, comm: Comm, axis: Axis
    ) -> Tensor:
        wide = logits
        if logits.dtype != torch.float64:
            wide = logits.float()
        hi = lo + wide.shape[-1]
        local_largest = wide.amax(-1)
        largest = comm.all_reduce(local_largest, axis, op="max")
        shifted = wide - largest.unsqueeze(-1)
        is_local = (targets >= lo) & (targets < hi)
        local_targets = torch.where(is_local, targets - lo, 0).unsqueeze(-1)
        target_logits = shifted.gather(-1, local_targets).squeeze(-1)
        target_logits = torch.where(is_local, target_logits, 0.0)
        exponentials = shifted.exp_()
        local_sums = torch.stack((exponentials.sum(-1), target_logits))
        sums, target_logits = comm.all_reduce(local_sums, axis).unbind(0)
        softmax = exponentials.div_(sums.unsqueeze(-1))
        counted = targets != IGNORE
        ctx.save_for_backward(softmax, local_targets, is_local, counted)
        ctx.dtype = logits.dtype
        losses = sums.log() - target_logits
        return torch.where(counted, losses, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, local_targets, is_local, counted = ctx.saved_tensors
        ones = is_local.unsqueeze(-1).to(softmax.dtype)
        delta = softmax.scatter_add(-1, local_targets, -ones)
        scale = counted * gradient  # a gradient of each loss
        d_logits = delta * scale.unsqueeze(-1)
        return d_logits.to(ctx.dtype), None, None, None, None
