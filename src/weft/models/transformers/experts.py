"""Experts behind transformers' interface: tokens are sorted by expert by weft's `Dispatch`, which expert parallelism replaces."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.models.common.experts import (
    DISPATCH,
    MATRICES,
    Dispatch,
    ExpertLoads,
    as_matrices,
    expert_product,
)
from weft.models.transformers.own_experts import dispatch_own, own_experts


def set_dispatch(lm: nn.Module) -> None:
    """Give each module of experts that calls the interface its `Dispatch`, which ep replaces, and the
    names of its matrices.
    """
    for module in lm.modules():
        if is_experts(module):
            setattr(module, DISPATCH, Dispatch(int(module.num_experts)))  # type: ignore[arg-type]
            setattr(module, MATRICES, (_first_matrix(module), "down_proj"))
    for _, module in own_experts(lm):
        dispatch_own(module)


def _first_matrix(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def is_experts(module: nn.Module) -> bool:
    """Whether a module computes experts through transformers' interface."""
    return hasattr(module, "has_gate") and hasattr(module, "num_experts")


def expert_params(lm: nn.Module) -> dict[str, int]:
    """Name of a parameter whose first dim holds experts that a `Dispatch` serves -> their number."""
    found = {
        f"{path}.{name}": int(module.num_experts)
        for path, module in lm.named_modules()
        if is_experts(module)
        for name, param in module.named_parameters(recurse=False)
        if param.dim() > 1 and len(param) == module.num_experts
    }
    for path, module in own_experts(lm):
        number = int(module.num_experts)  # type: ignore[arg-type]
        found |= {f"{path}.{name}": number for name, _ in module.named_parameters()}
    return found


def mixture(experts: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, as transformers calls it: x_ND, experts_NK, weights_NK -> y_ND."""
    dispatch = experts._modules.get(DISPATCH) or Dispatch(int(experts.num_experts))  # type: ignore[arg-type]
    y: Tensor = dispatch(x, top_k_index, top_k_weights, ExpertsOfRank(experts))
    return y.to(x.dtype)


class ExpertsOfRank:
    """The experts that a module of transformers holds, each on its own tokens."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts: Any = experts

    def __call__(self, x_ND: Tensor, loads: ExpertLoads) -> Tensor:
        """Tokens in the order of their experts -> the same order."""
        experts = self._experts
        h = self._linear(_first_matrix(experts), x_ND, loads)
        h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
        h = self._linear("down_proj", h, loads)
        has_norm = getattr(experts, "has_post_expert_norm", False)  # older releases have none
        return experts.post_expert_norm(h) if has_norm else h

    def _linear(self, name: str, x_NK: Tensor, loads: ExpertLoads) -> Tensor:
        experts = self._experts
        bias_EM = getattr(experts, f"{name}_bias") if experts.has_bias else None
        product = expert_product(experts, name)
        return product(x_NK, as_matrices(experts, name), loads, bias_EM=bias_EM)
