"""Experts of a mixture, and the dispatch of tokens to them and back; no token is dropped, nothing loops over tokens.

Expert parallelism replaces the seam `Dispatch`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.axes import span_sizes

DISPATCH = "weft_dispatch"
"""Child of a module that holds experts and sends tokens to them itself."""


class Experts(nn.Module):
    """E SwiGLU networks in three tensors; E and F are read from the weights, so shards along either
    work unchanged.
    """

    def __init__(self, dim: int, ffn: int, *, num_experts: int) -> None:
        super().__init__()
        inward = (num_experts, ffn, dim)
        outward = (num_experts, dim, ffn)
        self.gate = nn.Parameter(torch.empty(inward))
        self.up = nn.Parameter(torch.empty(inward))
        self.down = nn.Parameter(torch.empty(outward))
        for weight in self.parameters():
            bound = weight.shape[2] ** -0.5  # as each nn.Linear
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Tokens in the order of their experts, counts_E of them each -> the same order; partial
        sums where F is sharded.

        Every expert gets a gradient, zeros if it saw no token.
        """
        num_tokens = len(x_ND)
        runs = x_ND.split(local_lengths(counts_E, num_tokens))
        experts = zip(runs, self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        outputs: list[Tensor] = []
        for run, gate, up, down in experts:
            is_skipped = len(run) == 0 and num_tokens > 0
            if is_skipped:
                continue
            activated = F.silu(F.linear(run, gate))
            hidden = activated * F.linear(run, up)
            outputs.append(F.linear(hidden, down))
        return torch.cat(outputs)


def local_lengths(counts_E: Tensor, total: int) -> list[int]:
    """The counts as numbers; of tensors without values (meta, or fake) an even load."""
    if not _has_values(counts_E):
        return list(span_sizes(total, len(counts_E)))
    lengths: list[int] = counts_E.tolist()
    return lengths


def _has_values(tensor: Tensor) -> bool:
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # where it is not loaded, none is fake
    return not tensor.is_meta and not (fakes and isinstance(tensor, fakes.FakeTensor))


@dataclass(frozen=True)
class Sorting:
    """The order of slots by expert, where slot n K + k is the k-th choice of token n.

    Attributes:
        slots: the slot at each place of the order, [N K] int64.
        places: the place of each slot, [N, K] int64.
        counts: how many slots each expert has, [E] int64.
    """

    slots: Tensor
    places: Tensor
    counts: Tensor

    def spread(self, x_ND: Tensor) -> Tensor:
        """A copy of its token for each slot, in order."""
        tokens = self.slots // self.places.shape[1]
        return _gather(x_ND, tokens, users_NK=self.places)

    def collect(self, rows: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum over each token's slots, from rows in order -> y_ND of the rows' dtype."""
        slots = _gather(rows, self.places.flatten(), users_NK=self.slots.unsqueeze(1))
        slots_NKD = slots.unflatten(0, self.places.shape)
        weights_NK1 = weights_NK.unsqueeze(-1)
        y_ND: Tensor = (slots_NKD * weights_NK1).sum(1)
        return y_ND.to(rows.dtype)


def sort_by_expert(experts_NK: Tensor, num_experts: int) -> Sorting:
    """Slots by expert, those of one expert by token."""
    experts = experts_NK.flatten()
    slots = experts.argsort(stable=True)
    order = torch.arange(len(slots), device=slots.device)
    places = torch.empty_like(slots)
    places.scatter_(0, slots, order)
    counts_1E = count_experts(experts.unsqueeze(0), num_experts)
    return Sorting(slots, places.view_as(experts_NK), counts_1E[0])


def _gather(x: Tensor, index: Tensor, *, users_NK: Tensor) -> Tensor:
    """x[index], where row n of x goes to the places users_NK[n]; its backward is a gather too, in
    fixed order.

    The backward of plain indexing adds to rows: on a GPU with atomics, in another order each time.
    """
    rows: Tensor = _Gather.apply(x, index, users_NK)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, users_NK: Tensor) -> Tensor:
        ctx.save_for_backward(users_NK)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (users_NK,) = ctx.saved_tensors
        rows = dy.index_select(0, users_NK.flatten())
        dx = rows.unflatten(0, users_NK.shape).sum(1)
        return dx, None, None


class Dispatch(nn.Module):
    """Seam: sends each token to its experts and returns the weighted sum of their outputs; no token
    is dropped.

    A subclass that dispatches otherwise must override `requirements`, too: expert parallelism
    rejects what it lacks.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute."""
        return frozenset({"dropless"})

    def forward(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: nn.Module
    ) -> Tensor:
        """x_ND -> y_ND; `experts(x, counts)` takes tokens in the order of their experts and keeps
        that order. The counts are int64 on any device: on the CPU reading them costs no wait.
        """
        sorting = sort_by_expert(experts_NK, self.num_experts)
        rows = sorting.spread(x_ND)
        rows_out: Tensor = experts(rows, sorting.counts)
        return sorting.collect(rows_out, weights_NK)


def count_experts(experts_BN: Tensor, num_experts: int) -> Tensor:
    """How often each row names each expert: experts_BN -> counts_BE int64."""
    num_rows = experts_BN.shape[0]
    counts_BE = experts_BN.new_zeros(num_rows, num_experts)
    ones_BN = torch.ones_like(experts_BN)
    return counts_BE.scatter_add_(1, experts_BN, ones_BN)
