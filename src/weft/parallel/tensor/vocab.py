"""Owns the cut vocabulary: embedding and cross entropy over rows that are spread over tp.

Note [Uneven vocabulary]
    A vocabulary that tp does not divide is cut into parts whose lengths differ by at most one. No rank holds a row that
    does not exist, so there is nothing to pad, nothing to mask in the loss and nothing to strip from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import Rule, span
from weft.core.mesh import Axis
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import sharded_over
from weft.errors import Fault, PlanError
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.layers import Loss
from weft.parallel.tensor.region import SEQ_DIM, Region


class VocabParallelEmbedding(nn.Module):
    """Rows of the table are cut over `axis`; each rank looks up its own, the sum over ranks is the embedding.

    tokens_BS (int64, the same on every rank of the group) -> x_BSD; with `sequence_parallel` this rank's part along the sequence.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        comm: Comm,
        axis: Axis = "tp",
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.region = Region(comm, axis, sequence_parallel)
        self.lo, hi = span(num_embeddings, comm.degree(axis), comm.index(axis))
        self.weight = nn.Parameter(torch.empty(hi - self.lo, embedding_dim, device=device, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight)

    @classmethod
    def adopt(cls, module: nn.Embedding, region: Region) -> VocabParallelEmbedding:
        """The embedding whose already cut table `module` holds."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.region, self.weight = region, cast(nn.Parameter, module.weight)
        self.lo, _ = span(module.num_embeddings, region.comm.degree(region.axis), region.comm.index(region.axis))
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens_BS -> x_BSD."""
        local = tokens - self.lo
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = nn.functional.embedding(torch.where(mine, local, 0), self.weight)
        rows = rows * mine.unsqueeze(-1)
        comm, axis = self.region.comm, self.region.axis
        return (
            ops.reduce_scatter(rows, comm, axis, dim=SEQ_DIM)
            if self.region.sequence
            else ops.reduce_from_region(rows, comm, axis)
        )


class VocabParallelLoss(nn.Module):
    """Sum of cross entropies where each rank holds the logits of its part of the vocabulary.

    Two all-reduces of one number a token (largest logit; sum of exponentials with the target's logit) instead of a gather of
    all logits. Every rank of the group gets the same sum.
    """

    def __init__(self, vocab: int, *, comm: Comm, axis: Axis = "tp") -> None:
        super().__init__()
        self.comm, self.axis = comm, axis
        self.lo, self.hi = span(vocab, comm.degree(axis), comm.index(axis))

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        """logits_BSV (this rank's part of V), targets_BS -> scalar sum over the targets that count."""
        return vocab_cross_entropy(logits, batch.targets, lo=self.lo, comm=self.comm, axis=self.axis)


def vocab_cross_entropy(logits: Tensor, targets: Tensor, *, lo: int, comm: Comm, axis: Axis) -> Tensor:
    """Sum over counted targets of -log softmax; `logits[..., v]` belongs to vocabulary entry `lo + v`."""
    total: Tensor = _VocabCrossEntropy.apply(logits, targets, lo, comm, axis)  # type: ignore[no-untyped-call]
    return total


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, lo: int, comm: Comm, axis: Axis) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = comm.all_reduce(wide.amax(-1), axis, op="max")
        shifted = wide - top.unsqueeze(-1)
        mine = (targets >= lo) & (targets < lo + wide.shape[-1])
        places = torch.where(mine, targets - lo, 0).unsqueeze(-1)
        picked = torch.where(mine, shifted.gather(-1, places).squeeze(-1), 0.0)
        weights = shifted.exp_()
        sums, picked = comm.all_reduce(torch.stack((weights.sum(-1), picked)), axis).unbind(0)
        counted = targets != IGNORE
        ctx.save_for_backward(weights.div_(sums.unsqueeze(-1)), places, mine, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, sums.log() - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, places, mine, counted = ctx.saved_tensors
        delta = softmax.scatter_add(-1, places, -mine.unsqueeze(-1).to(softmax.dtype))
        return (delta * (counted * gradient).unsqueeze(-1)).to(ctx.dtype), None, None, None, None


def apply(name: str, block: nn.Module, *, comm: Comm, table: AxisTable, rule: Rule, sequence: bool) -> None:
    """Make the embeddings of `block` whose rows are the cut vocabulary parallel; their tables must have been cut already.

    Under sequence parallelism the block's output is this rank's part of the sequence; what else the block looks up (learned
    positions) is looked up for that part only.

    Raises:
        PlanError: an embedding cut along its features.
    """
    region = Region(comm, "tp", sequence)
    found = False
    for path, module in list(block.named_modules()):
        if not isinstance(module, nn.Embedding):
            continue
        row_axis, feature_axis = logical_axes(f"{name}.{path}.weight", table)
        if sharded_over(feature_axis, rule) == "tp":
            raise PlanError(
                Fault(f"{name}.{path}.weight", "an embedding cannot be cut along its features", got=str(feature_axis))
            )
        if sharded_over(row_axis, rule) == "tp":
            block.set_submodule(path, VocabParallelEmbedding.adopt(module, region))
            found = True
    learns_positions = any(isinstance(module, nn.Embedding) for module in block.modules())
    if found and sequence and learns_positions:
        _cut_positions(block, comm)


def _cut_positions(block: nn.Module, comm: Comm) -> None:
    """Let `block` see all tokens (their embeddings are reduce-scattered) but only its own part of the positions."""

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, batch = args
        own = batch.positions.chunk(comm.degree("tp"), SEQ_DIM)[comm.index("tp")]
        return x, replace(batch, positions=own)

    block.register_forward_pre_hook(cut)


def cut_losses(blocks: dict[str, nn.Module], *, vocab: int, comm: Comm) -> None:
    """Make every Loss seam, as a block or inside one, take logits whose vocabulary is cut over tp."""
    for name, block in blocks.items():
        for path, module in list(block.named_modules()):
            if isinstance(module, Loss) and path:
                block.set_submodule(path, VocabParallelLoss(vocab, comm=comm))
        if isinstance(block, Loss):
            blocks[name] = VocabParallelLoss(vocab, comm=comm)
