"""Experts behind transformers' interface: tokens are sorted by expert by weft's `Dispatch`, which expert parallelism replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.experts import DISPATCH, Dispatch, local_lengths

Linear = tuple[Tensor, Tensor | None]
"""Weight (features out, in) and bias of one expert."""


def set_dispatch(lm: nn.Module) -> None:
    """Give each module of experts that calls the interface its `Dispatch`, which ep replaces."""
    for module in lm.modules():
        if is_experts(module):
            setattr(module, DISPATCH, Dispatch(int(module.num_experts)))  # type: ignore[arg-type]


def is_experts(module: nn.Module) -> bool:
    """Whether a module computes experts through transformers' interface."""
    return hasattr(module, "has_post_expert_norm") and hasattr(module, "num_experts")


def expert_params(lm: nn.Module) -> frozenset[str]:
    """Names of parameters whose first dim counts experts that a `Dispatch` serves."""
    return frozenset(
        f"{path}.{name}"
        for path, module in lm.named_modules()
        if is_experts(module)
        for name, param in module.named_parameters(recurse=False)
        if param.dim() > 1 and len(param) == module.num_experts
    )


def mixture(experts: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, as transformers calls it: x_ND, experts_NK, weights_NK -> y_ND."""
    dispatch = experts._modules.get(DISPATCH) or Dispatch(int(experts.num_experts))  # type: ignore[arg-type]
    y: Tensor = dispatch(x, top_k_index, top_k_weights, ExpertsOfRank(experts))
    return y.to(x.dtype)


class ExpertsOfRank:
    """The experts that a module of transformers holds, one after the other on their own tokens."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts: Any = experts

    def __call__(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Tokens in the order of their experts, counts_E of them each -> the same order."""
        num_tokens = len(x_ND)
        has_gate = self._experts.has_gate
        inward = self._linears("gate_up_proj" if has_gate else "up_proj")
        outward = self._linears("down_proj")
        outputs = [
            self._expert(run, inward[index], outward[index])
            for index, run in enumerate(x_ND.split(local_lengths(counts_E, num_tokens)))
            if len(run) > 0 or num_tokens == 0
        ]
        return torch.cat(outputs)

    def _expert(self, x_ND: Tensor, inward: Linear, outward: Linear) -> Tensor:
        experts = self._experts
        h = F.linear(x_ND, *inward)
        h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
        h = F.linear(h, *outward)
        return experts.post_expert_norm(h) if experts.has_post_expert_norm else h

    def _linears(self, name: str) -> Sequence[Linear]:
        """Weight and bias of each expert: taken apart at once, so that the backward fills one tensor."""
        experts = self._experts
        weights = getattr(experts, name).unbind()
        if experts.is_transposed:
            weights = [weight.T for weight in weights]
        if not experts.has_bias:
            return [(weight, None) for weight in weights]
        return list(zip(weights, getattr(experts, f"{name}_bias").unbind(), strict=True))
