"""Expert parallelism: all-to-all dispatch of tokens to the ranks that hold their experts; mixtures under tp and cp.

Note [A mixture is one tensor-parallel region]
    Under tp the features of every expert and of the shared one are sharded. The region is entered
    once, at the mixture's input, and left once, after routed and shared parts have been added: one
    collective a side and direction, as for a dense MLP. Inside, each tp rank routes the same
    tokens; the gradient that the router receives through the weights is this rank's part, so the
    gradient rule sums it over tp. The balance loss would be counted tp times by that sum: the first
    tp rank alone adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import span, span_sizes
from weft.core.mesh import Axis
from weft.core.model_config import AxisTable, logical_axes
from weft.core.shard import sharded_over
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.models.common.batch import Batch
from weft.models.common.experts import (
    DISPATCH,
    Dispatch,
    ExpertLoads,
    PlannedKernels,
    Sorting,
    sort_by_expert,
)
from weft.models.common.init import path_below
from weft.models.common.moe import Balance, MoE
from weft.models.common.seam import check_replaceable
from weft.parallel.cp import AXIS as CP
from weft.parallel.ep import AXIS as EP
from weft.parallel.tp import AXIS as TP

ExpertLoad = Callable[[int, int, int], Sequence[int]]
"""(tokens, experts of a token, experts) -> tokens of each expert: what is assumed on the meta
device, where a router chooses nothing.
"""


def even_load(num_tokens: int, top_k: int, num_experts: int) -> Sequence[int]:
    """As many tokens for each expert: what balanced routers come to."""
    return span_sizes(num_tokens * top_k, num_experts)


def first_rank_load(num_ranks: int) -> ExpertLoad:
    """All tokens go to the experts of the first of `num_ranks`, evenly; if it has fewer than a token
    visits, to all of these and to the next ones.
    """

    def load(num_tokens: int, top_k: int, num_experts: int) -> Sequence[int]:
        _, num_local = span(num_experts, num_ranks, 0)
        num_first = min(top_k, num_local)
        num_next = top_k - num_first
        num_others = num_experts - num_local - num_next
        first = span_sizes(num_tokens * num_first, num_local)
        following = (num_tokens,) * num_next
        others = (0,) * num_others
        return (*first, *following, *others)

    return load


@runtime_checkable
class MetaLoadedDispatch(Protocol):
    """The contract of a dispatch over ep: on the meta device it sends what an assumed load says, so
    that steps with uneven routing can be measured.

    Attributes:
        meta_load: of this rank's tokens and of every other's.
    """

    meta_load: ExpertLoad


class ExpertParallelDispatch(nn.Module):
    """Experts are sharded over `axis`: rank i holds experts `span(E, n, i)`. Every rank has tokens
    of its own; none is dropped.

        slots sorted by expert ──all_to_all──> sorted by (rank, expert) ──> sorted by expert ──> experts
        y <── weighted sum <── sorted by expert <──all_to_all── sorted by (rank, expert) <──────────┘

    Sizes are uneven and known after one small gather of counts. Source: Lepikhin et al. 2020
    (GShard); Gale et al. 2022.

    Attributes:
        meta_load: of this rank's tokens and of every other's, assumed on the meta device.
        is_alone: whether a check runs the block on this rank alone: its experts compute in place of
            those of other ranks.
    """

    supports = frozenset({"dropless"})
    left_out = ("forward",)

    def __init__(self, num_experts: int, *, comm: Comm, axis: Axis = EP) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.comm = comm
        self.axis = axis
        self.meta_load: ExpertLoad = even_load
        self.planned: PlannedKernels | None = None
        self.is_alone = False

    def forward(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: nn.Module
    ) -> Tensor:
        """x_ND -> y_ND, as `Dispatch`; `experts` holds this rank's ones."""
        comm = self.comm
        axis = self.axis
        degree = comm.degree(axis)
        lo, hi = span(self.num_experts, degree, comm.index(axis))
        if self.is_alone:
            own = Dispatch(hi - lo)
            return own(x_ND, experts_NK % (hi - lo), weights_NK, experts)  # type: ignore[no-any-return]
        sorting = sort_by_expert(experts_NK, self.num_experts)
        # Every rank needs the counts of all: its column of them says what it receives, its row what it sends.
        counts_1E = sorting.counts.unsqueeze(0)
        counts_RE = comm.all_gather(counts_1E, axis, dim=0)
        local_counts_RE = counts_RE[:, lo:hi]
        if counts_RE.is_meta:
            num_tokens, top_k = experts_NK.shape
            load = self.meta_load(num_tokens, top_k, self.num_experts)
            host_counts = [list(load)] * degree
        else:
            host_counts = counts_RE.tolist()  # the one wait for the device
        own_counts = host_counts[comm.index(axis)]
        send_sizes = []
        for rank in range(degree):
            first, last = span(self.num_experts, degree, rank)
            send_sizes.append(sum(own_counts[first:last]))
        recv_sizes = [sum(row[lo:hi]) for row in host_counts]
        expert_counts = [sum(column) for column in zip(*host_counts, strict=True)]
        # Called by ranks without a token, too, and in the backward again: the other ranks wait for them.
        received = ops.all_to_all(
            sorting.spread(x_ND), comm, axis, send_sizes=send_sizes, recv_sizes=recv_sizes
        )
        by_expert = _by_expert(local_counts_RE, num_rows=sum(recv_sizes))
        rows = by_expert.spread(received)
        loads = ExpertLoads(by_expert.counts, tuple(expert_counts[lo:hi]), self.planned)
        rows_out: Tensor = experts(rows, loads)
        returned = ops.all_to_all(
            _inverse(by_expert).spread(rows_out),
            comm,
            axis,
            send_sizes=recv_sizes,
            recv_sizes=send_sizes,
        )
        return sorting.collect(returned, weights_NK)


def _by_expert(counts_RE: Tensor, *, num_rows: int) -> Sorting:
    """The sorting by expert of `num_rows` rows that are sorted by (rank, expert)."""
    num_ranks, num_experts = counts_RE.shape
    experts_E = torch.arange(num_experts, device=counts_RE.device)
    experts_of_ranks = experts_E.repeat(num_ranks)
    # The number of rows is known on the host; without it this would wait for the device.
    expert_of_row = experts_of_ranks.repeat_interleave(counts_RE.flatten(), output_size=num_rows)
    return sort_by_expert(expert_of_row.unsqueeze(1), num_experts)


def _inverse(sorting: Sorting) -> Sorting:
    """The inverse permutation, as a sorting with one slot a row."""
    return Sorting(sorting.places.flatten(), sorting.slots.unsqueeze(1), sorting.counts)


class ShardedBalance(Balance):
    """The balance loss where a sequence's tokens are sharded over `axis`, and only some ranks count
    it.
    """

    supports = frozenset({"sequence_balance"})

    def __init__(self, plain: Balance, *, comm: Comm, axis: Axis, counts: bool) -> None:
        super().__init__(top_k=plain.top_k, weight=plain.weight)
        self.comm = comm
        self.axis = axis
        self.counts = counts

    def forward(self, scores_BSE: Tensor, batch: Batch) -> Tensor | None:
        """The part of these tokens; None on ranks that do not count."""
        if not self.counts:
            return None
        return super().forward(scores_BSE, batch)

    def sums(self, counts_BE: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        """Counts in whole sequences."""
        targets_B1 = targets_B.unsqueeze(1)
        local = torch.cat((counts_BE, targets_B1), dim=1)
        total = self.comm.all_reduce(local, self.axis)
        num_experts = counts_BE.shape[1]
        total_counts_BE, total_targets_B1 = total.split((num_experts, 1), dim=1)
        return total_counts_BE, total_targets_B1.squeeze(1)


def transform(
    blocks: dict[str, nn.Module], *, plan: Plan, comm: Comm, axes: AxisTable, **_unused: object
) -> tuple[str, ...]:
    """The transform of the dimension ep, which also serves mixtures whose sequences are sharded
    over cp or tp.

    Raises:
        PlanError: a parameter sharded over ep that no `Dispatch` serves, or a seam that requires
            what is not supported.
    """
    for name, block in blocks.items():
        mixtures: dict[str, MoE] = {
            path: module for path, module in block.named_modules() if isinstance(module, MoE)
        }
        _check_experts(name, block, mixtures, plan, axes=axes)
        for path, mixture in mixtures.items():
            _make_parallel(path_below(name, path), mixture, comm)
        for path, holder in _holders(block).items():
            _make_dispatch_parallel(path_below(name, path), holder, DISPATCH, comm)
    return ()


def _holders(block: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts beside their own `Dispatch`."""
    return {
        path: module
        for path, module in block.named_modules()
        if isinstance(module._modules.get(DISPATCH), Dispatch)
    }


def _make_dispatch_parallel(key: str, holder: nn.Module, name: str, comm: Comm) -> None:
    if comm.degree(EP) == 1:
        return
    plain = getattr(holder, name)
    check_replaceable(
        plain,
        Dispatch,
        name="expert parallelism",
        supports=ExpertParallelDispatch.supports,
        key=f"{key}.{name}",
    )
    setattr(holder, name, ExpertParallelDispatch(plain.num_experts, comm=comm))


def _make_parallel(key: str, mixture: MoE, comm: Comm) -> None:
    _make_dispatch_parallel(key, mixture, "dispatch", comm)
    if comm.degree((CP, TP)) > 1:
        check_replaceable(
            mixture.balance,
            Balance,
            name="the sharded balance loss",
            supports=ShardedBalance.supports,
            key=f"{key}.balance",
        )
        mixture.balance = ShardedBalance(
            mixture.balance, comm=comm, axis=CP, counts=comm.index(TP) == 0
        )


def _check_experts(
    name: str, block: nn.Module, mixtures: dict[str, MoE], plan: Plan, *, axes: AxisTable
) -> None:
    """Parameters sharded over ep must be experts that a `Dispatch` sends tokens to."""
    rule = plan.sharding_rule
    served = (
        *(f"{path}.experts.".lstrip(".") for path in mixtures),
        *(f"{path}." for path in _holders(block)),
    )
    for path, _ in block.named_parameters():
        key = f"{name}.{path}"
        mesh_axes = [sharded_over(axis, rule) for axis in logical_axes(key, axes)]
        if EP in mesh_axes and not path.startswith(served):
            what = "sharded over ep, but no Dispatch sends tokens to it"
            fix = "hold it in the `experts` of a MoE, or name axes that are not sharded"
            raise PlanError(Fault(key, what, fix=fix))
