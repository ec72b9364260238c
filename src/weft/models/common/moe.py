"""Mixtures of experts: routing, load balancing, and the layer.

Parallel code replaces the seams `Dispatch` (expert parallelism) and `Balance` (sharded sequences).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.batch import IGNORE, Batch, Extra
from weft.models.common.experts import Dispatch, Experts, count_experts
from weft.models.common.layers import Layer, RegionInput, RegionOutput


class Routing(NamedTuple):
    """Experts of each token: experts_BSK int64, weights_BSK of their outputs; scores_BSE of all
    experts, float32 at least.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Choice:
    """How each token's experts are chosen and weighed.

    Attributes:
        scoring: "sigmoid" has a bias by which the load is balanced (Wang et al. 2024), "softmax"
            has none.
        n_group: number of groups of experts, of which a token uses `topk_group`, those with the
            highest sum of their two best scores (DeepSeek-V3, section 2.1.2).
        norm_topk_prob: the weights of a token's experts sum to 1 before scaling.
    """

    num_experts: int
    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def experts(self, scores: Tensor) -> Tensor:
        """scores[..., E] -> [..., K] experts of the highest scores in the allowed groups, best
        first.
        """
        if self.topk_group < self.n_group:
            scores = self._in_best_groups(scores)
        return scores.topk(self.top_k, dim=-1).indices

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """The scores, -inf outside the groups whose two best ones have the highest sums."""
        groups = scores.unflatten(-1, (self.n_group, -1))
        group_size = groups.shape[-1]
        num_best = min(2, group_size)
        two_best = groups.topk(num_best, dim=-1).values
        group_scores = two_best.sum(-1)
        allowed = group_scores.topk(self.topk_group, dim=-1).indices
        all_masked = torch.ones_like(group_scores, dtype=torch.bool)
        # masked by -inf and not by 0: scores with a bias may be negative
        is_masked = all_masked.scatter(-1, allowed, False)
        groups = groups.masked_fill(is_masked.unsqueeze(-1), -torch.inf)
        allowed_scores: Tensor = groups.flatten(-2)
        return allowed_scores

    def weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores[..., E], experts[..., K] -> [..., K]."""
        weights = scores.gather(-1, experts)
        if self.norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20)
        return weights * self.routed_scaling_factor


class Router(nn.Module):
    """Chooses experts by score + bias, weighs them by score alone; computes in float32 at least.

    The bias gets no gradient: once a step it becomes `rebalance(bias, load, rate=router.rate)`.
    """

    def __init__(self, dim: int, choice: Choice, *, rate: float = 0.0) -> None:
        super().__init__()
        self.choice = choice
        self.rate = rate
        self.proj = nn.Linear(dim, choice.num_experts, bias=False)
        self.bias: nn.Parameter | None = None
        if choice.scoring == "sigmoid":
            self.bias = nn.Parameter(torch.zeros(choice.num_experts), requires_grad=False)

    def forward(self, x_BSD: Tensor) -> Routing:
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        weight = self.proj.weight.to(wide)
        logits_BSE = F.linear(x_BSD.to(wide), weight)
        if self.choice.scoring == "sigmoid":
            scores_BSE = logits_BSE.sigmoid()
        else:
            scores_BSE = logits_BSE.softmax(-1)
        # the choice has no gradient; weights take theirs from the scores
        ranking_BSE = scores_BSE.detach()
        if self.bias is not None:
            ranking_BSE = ranking_BSE + self.bias
        experts_BSK = self.choice.experts(ranking_BSE)
        weights_BSK = self.choice.weights(scores_BSE, experts_BSK)
        return Routing(experts_BSK, weights_BSK, scores_BSE)


def rebalance(bias_E: Tensor, load_E: Tensor, *, rate: float) -> Tensor:
    """The bias after a step: up by `rate` where the load of all ranks was under the mean, down
    where it was over it.

    load_E int64 is exact, and so is the comparison: every layout takes the same step.
    Source: Wang et al. 2024, algorithm 1; DeepSeek-V3, section 2.1.2.
    """
    num_experts = load_E.numel()
    # in whole numbers, whose sign no rounding changes
    below_mean_E = load_E.sum() - num_experts * load_E
    direction_E = below_mean_E.sign()
    return bias_E + rate * direction_E.to(bias_E.dtype)


class Balance(nn.Module):
    """Seam: the sequence-wise balance loss of DeepSeek-V3 (equations 17 to 20), as a part of the
    summed loss.

    For one sequence of T tokens: f_i = E / (K T) x (tokens whose K highest scores, without bias and
    groups, include expert i's), P_i = mean of expert i's share in the scores, loss = weight x sum_i
    f_i P_i; an even load gives 1 x weight. It is multiplied by the sequence's number of targets, so
    the step's loss has its mean over targets, however sequences are batched.

    f is a constant to the gradient, so the loss is a sum over tokens: where a sequence is sharded,
    each rank adds the part of its own tokens, and only `sums` is over all ranks.
    """

    def __init__(self, *, top_k: int, weight: float) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = weight

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute; a subclass that overrides `forward`
        must override this, too.
        """
        return frozenset({"sequence_balance"})

    def forward(self, scores_BSE: Tensor, batch: Batch) -> Tensor | None:
        """The loss of these tokens, a scalar of the scores' dtype; None where its weight is 0."""
        if self.weight == 0:
            return None
        num_experts = scores_BSE.shape[-1]
        chosen_BSK = scores_BSE.detach().topk(self.top_k, dim=-1).indices
        own_counts_BE = count_experts(chosen_BSK.flatten(1), num_experts)
        own_targets_B = (batch.targets != IGNORE).sum(1)
        counts_BE, targets_B = self.sums(own_counts_BE, own_targets_B)
        choices_B1 = counts_BE.sum(1, keepdim=True)
        tokens_B1 = choices_B1.to(scores_BSE.dtype) / self.top_k
        f_BE = counts_BE * num_experts / (self.top_k * tokens_B1)
        totals_BS1 = scores_BSE.sum(-1, keepdim=True)
        shares_BE = (scores_BSE / totals_BS1).sum(1)
        targets_B1 = targets_B.unsqueeze(1)
        terms_BE = targets_B1 * f_BE * shares_BE / tokens_B1
        return self.weight * terms_BE.sum()

    def sums(self, counts_BE: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of choices and of targets in whole sequences, from those of this rank's tokens."""
        return counts_BE, targets_B


class MoE(nn.Module):
    """A layer's feed-forward part: each token's routed experts, plus a shared expert for all
    tokens.
    """

    def __init__(
        self,
        *,
        router: Router,
        experts: Experts,
        shared: nn.Module | None = None,
        balance_weight: float = 0.0,
    ) -> None:
        super().__init__()
        choice = router.choice
        self.router = router
        self.experts = experts
        self.shared = shared
        self.region_input = RegionInput()
        self.region_output = RegionOutput()
        self.dispatch = Dispatch(choice.num_experts)
        self.balance = Balance(top_k=choice.top_k, weight=balance_weight)

    def forward(self, x_BSD: Tensor, batch: Batch) -> Extra:
        x_BSD = self.region_input(x_BSD)
        routing = self.router(x_BSD)
        y_ND: Tensor = self.dispatch(
            x_BSD.flatten(0, 1),
            routing.experts.flatten(0, 1),
            routing.weights.flatten(0, 1),
            self.experts,
        )
        y_BSD = y_ND.view_as(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        # The balance loss comes before the region's output: under tp only the first rank has it. A repeated forward
        # (full recomputation) ends with the last tensor that a backward needs; behind the output's all-reduce that
        # tensor would make the first rank repeat the all-reduce without the others.
        balance_loss = self.balance(routing.scores, batch)
        num_experts = self.router.choice.num_experts
        load_BE = count_experts(routing.experts.flatten(1), num_experts)
        return Extra(self.region_output(y_BSD), loss=balance_loss, load=load_BE.sum(0))


class MoELayer(Layer):
    """One layer: attention and a mixture of experts, each behind its norm and beside a residual."""

    def forward(self, x_BSD: Tensor, batch: Batch) -> Extra:
        x_BSD = self.add_attention(x_BSD, batch)
        out: Extra = self.mlp(self.mlp_norm(x_BSD), batch)
        return out._replace(x=x_BSD + out.x)
