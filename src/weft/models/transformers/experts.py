"""Experts behind transformers' interface: tokens are sorted by expert by weft's `Dispatch`, which expert parallelism replaces."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.experts import DISPATCH, Dispatch, local_lengths


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
        outputs = [
            self._expert(index, run)
            for index, run in enumerate(x_ND.split(local_lengths(counts_E, num_tokens)))
            if len(run) > 0 or num_tokens == 0
        ]
        return torch.cat(outputs)

    def _expert(self, index: int, x_ND: Tensor) -> Tensor:
        experts = self._experts
        inward = "gate_up_proj" if experts.has_gate else "up_proj"
        h = self._linear(inward, index, x_ND)
        h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
        h = self._linear("down_proj", index, h)
        return experts.post_expert_norm(h) if experts.has_post_expert_norm else h

    def _linear(self, name: str, index: int, x_ND: Tensor) -> Tensor:
        experts = self._experts
        weight = getattr(experts, name)[index]
        bias = getattr(experts, f"{name}_bias")[index] if experts.has_bias else None
        return F.linear(x_ND, weight.T if experts.is_transposed else weight, bias)
