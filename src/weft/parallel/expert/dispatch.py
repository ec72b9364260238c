"""Owns expert parallelism: tokens travel to the ranks that hold their experts and back; and mixtures under tp and cp.

Note [A mixture is one tensor-parallel region]
    Under tp every expert's and the shared expert's features are cut. The region is entered once, at the mixture, and left
    once, after routed and shared parts have been added: one operation a side and direction, as for a dense MLP. Inside, each
    tp rank routes the same tokens; what the router gets back through the weights is this rank's part of the gradient, so the
    gradient rule sums it over tp. The balance loss would be counted tp times by that sum: the first tp rank alone adds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import span, span_sizes
from weft.core.mesh import Axis
from weft.models.common.batch import Batch
from weft.models.common.experts import Sorting, sort_by_expert
from weft.models.common.moe import Balance, MoE
from weft.parallel.cp import AXIS as CP
from weft.parallel.ep import AXIS as EP
from weft.parallel.tp import AXIS as TP


class ExpertParallelDispatch(nn.Module):
    """Experts are cut over `axis`: rank i holds experts `span(E, n, i)`. Every rank brings tokens of its own; none is dropped.

        slots sorted by expert ──all_to_all──> sorted by (rank, expert) ──> sorted by expert ──> experts
        y <── weighted sum <── sorted by expert <──all_to_all── sorted by (rank, expert) <──────────┘

    Sizes are uneven and known after one small gather of counts. Source: Lepikhin et al. 2020 (GShard); Gale et al. 2022.
    """

    def __init__(self, num_experts: int, *, comm: Comm, axis: Axis = EP) -> None:
        super().__init__()
        self.num_experts, self.comm, self.axis = num_experts, comm, axis

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: nn.Module) -> Tensor:
        """x_ND -> y_ND, as `Dispatch`; `experts` holds this rank's ones."""
        comm, axis = self.comm, self.axis
        sorting = sort_by_expert(experts_NK, self.num_experts)
        counts_RE = comm.all_gather(sorting.counts.unsqueeze(0), axis, dim=0)
        sends = [int(part.sum()) for part in sorting.counts.split(span_sizes(self.num_experts, comm.degree(axis)))]
        lo, hi = span(self.num_experts, comm.degree(axis), comm.index(axis))
        arriving_RE = counts_RE[:, lo:hi]
        takes = arriving_RE.sum(1).tolist()
        rows = ops.all_to_all(sorting.spread(x_ND), comm, axis, send_sizes=sends, recv_sizes=takes)
        local = _by_expert(arriving_RE)
        done = _undo(local).spread(experts_of(experts, local.spread(rows), local.counts))
        back = ops.all_to_all(done, comm, axis, send_sizes=takes, recv_sizes=sends)
        return sorting.collect(back, weights_NK)


def experts_of(experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """What this rank's experts make of tokens in the order of their experts."""
    out: Tensor = experts(rows, counts)
    return out


def _by_expert(counts_RE: Tensor) -> Sorting:
    """The order by expert of rows that lie by (rank, expert)."""
    num_experts = counts_RE.shape[1]
    expert = torch.arange(num_experts, device=counts_RE.device).repeat(len(counts_RE))
    return sort_by_expert(expert.repeat_interleave(counts_RE.flatten()).unsqueeze(1), num_experts)


def _undo(sorting: Sorting) -> Sorting:
    """The permutation back, as a sorting with one slot a row."""
    return Sorting(sorting.places.flatten(), sorting.slots.unsqueeze(1), sorting.counts)


class SpreadBalance(Balance):
    """The balance loss where a sequence's tokens lie on the ranks of `axis`, and only some ranks count it."""

    def __init__(self, plain: Balance, *, comm: Comm, axis: Axis, counts: bool) -> None:
        super().__init__(top_k=plain.top_k, weight=plain.weight)
        self.comm, self.axis, self.counts = comm, axis, counts

    def forward(self, scores_BSE: Tensor, batch: Batch) -> Tensor | None:
        """The part of these tokens; None on ranks that do not count."""
        return super().forward(scores_BSE, batch) if self.counts else None

    def sums(self, counts_BE: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        """Counts in whole sequences."""
        both = self.comm.all_reduce(torch.cat((counts_BE, targets_B.unsqueeze(1)), dim=1), self.axis)
        return both[:, :-1], both[:, -1]


def mixtures(block: nn.Module) -> dict[str, MoE]:
    """The mixtures below a block, by path."""
    return {path: module for path, module in block.named_modules() if isinstance(module, MoE)}


def transform(blocks: dict[str, nn.Module], *, comm: Comm, **_unused: object) -> tuple[str, ...]:
    """The transform of the dimension ep, which also serves mixtures whose sequences are sharded over cp or tp."""
    for block in blocks.values():
        apply(block, comm=comm)
    return ()


def apply(block: nn.Module, *, comm: Comm) -> None:
    """Let the mixtures below `block` find their experts over ep, and their sequences over cp."""
    for mixture in mixtures(block).values():
        if comm.degree(EP) > 1:
            mixture.dispatch = ExpertParallelDispatch(mixture.dispatch.num_experts, comm=comm)  # type: ignore[assignment]
        if comm.degree((CP, TP)) > 1:
            mixture.balance = SpreadBalance(mixture.balance, comm=comm, axis=CP, counts=comm.index(TP) == 0)


def leave_with(mixture: MoE, leave: Any) -> None:
    """Sum the mixture's output over the region's ranks, routed and shared parts together."""
    mixture.register_forward_hook(lambda _, args, out: out._replace(x=leave(out.x)))
