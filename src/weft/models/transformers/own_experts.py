"""Experts that a model computes by code of its own: that code runs on the tokens of a rank's experts, sorted by `Dispatch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.experts import DISPATCH, Dispatch, ExpertLoads

BY_CHOICE = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of experts that get tokens, and which experts each has chosen (DBRX)."""
BY_LENGTH = ("inputs", "expert_size")
"""Arguments of experts that get tokens in the order of their experts, and how many each has (JetMoE)."""
NUMBER = "num_experts"
Rows = Callable[[Tensor, Sequence[int]], Tensor]
"""Tokens in the order of their experts, and how many each expert has -> the same order."""


def own_experts(lm: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of experts that call no interface, by path: all their parameters are of experts."""
    for path, module in lm.named_modules():
        number = vars(module).get(NUMBER)
        if hasattr(module, "has_gate"):  # it calls the interface
            continue
        if type(number) is not int or _arguments(module) not in (BY_CHOICE, BY_LENGTH):
            continue
        params = list(module.parameters())
        if params and all(param.dim() > 1 and len(param) % number == 0 for param in params):
            yield path, module


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def dispatch_own(module: nn.Module) -> None:
    """Let a module of experts send tokens by a `Dispatch`, which ep replaces."""
    own, is_by_choice = module.forward, _arguments(module) == BY_CHOICE
    setattr(module, DISPATCH, Dispatch(int(getattr(module, NUMBER))))
    rows: Rows = partial(_by_choice if is_by_choice else _by_length, module, own)
    experts = ExpertsOfOwnCode(module, rows)

    def choose(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        dispatch: nn.Module = getattr(module, DISPATCH)
        x_ND = hidden_states.flatten(0, -2)
        y: Tensor = dispatch(
            x_ND, top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2), experts
        )
        return y.view_as(hidden_states)

    def send(inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        dispatch: nn.Module = getattr(module, DISPATCH)
        index_N1 = _numbers(expert_size, inputs.device)
        y: Tensor = dispatch(inputs, index_N1, inputs.new_ones(index_N1.shape), experts)
        return y

    module.forward = choose if is_by_choice else send


def _numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The expert of each token in the order of experts, [N, 1]."""
    runs = [torch.full((length, 1), each, device=device) for each, length in enumerate(lengths)]
    return torch.cat(runs)


def _by_choice(
    module: nn.Module, own: Callable[..., Tensor], x_ND: Tensor, lengths: Sequence[int]
) -> Tensor:
    index_N1 = _numbers(lengths, x_ND.device)
    y: Tensor = own(x_ND, index_N1, x_ND.new_ones(index_N1.shape))
    return y.view_as(x_ND)


def _by_length(
    module: nn.Module, own: Callable[..., Tensor], x_ND: Tensor, lengths: Sequence[int]
) -> Tensor:
    y_ND: Tensor = own(x_ND, list(lengths))
    return y_ND


class ExpertsOfOwnCode:
    """The experts that a module holds, each on its own tokens; their number is that of the rank
    meanwhile.
    """

    def __init__(self, module: nn.Module, rows: Rows) -> None:
        self._module = module
        self._rows = rows

    def __call__(self, x_ND: Tensor, loads: ExpertLoads) -> Tensor:
        """Tokens in the order of their experts -> the same order."""
        module: Any = self._module
        whole = module.num_experts
        module.num_experts = len(loads.counts)
        try:
            y_ND: Tensor = self._rows(x_ND, loads.lengths(len(x_ND)))
        finally:
            module.num_experts = whole
        if len(x_ND):
            return y_ND
        # no token: zeros, by which every expert has a gradient
        for param in module.parameters():
            y_ND = y_ND + param[:0].sum()
        return y_ND
