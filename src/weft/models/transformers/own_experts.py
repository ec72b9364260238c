"""Experts that a model computes by code of its own: that code runs on the tokens of a rank's experts, sorted by `Dispatch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.experts import DISPATCH, Dispatch, ExpertLoads

BY_CHOICE = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of experts that get tokens, and which experts each has chosen (DBRX)."""
BY_LENGTH = ("inputs", "expert_size")
"""Arguments of experts that get tokens in the order of their experts, and how many each has (JetMoE)."""
NUMBER = "num_experts"
Rows = Callable[[nn.Module, Tensor, Sequence[int]], Tensor]
"""A module, tokens in the order of its experts, and how many each expert has -> the same order."""


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
    is_by_choice = _arguments(module) == BY_CHOICE
    setattr(module, DISPATCH, Dispatch(int(getattr(module, NUMBER))))
    # a method, since a deep copy of the module has it call the copy
    module.forward = MethodType(_choose if is_by_choice else _send, module)


def _choose(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    dispatch: nn.Module = getattr(module, DISPATCH)
    choices = (x.flatten(0, -2) for x in (hidden_states, top_k_index, top_k_weights))
    y: Tensor = dispatch(*choices, ExpertsOfOwnCode(module, _by_choice))
    return y.view_as(hidden_states)


def _send(module: nn.Module, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
    dispatch: nn.Module = getattr(module, DISPATCH)
    index_N1 = _numbers(expert_size, inputs.device)
    ones_N1 = inputs.new_ones(index_N1.shape)
    y: Tensor = dispatch(inputs, index_N1, ones_N1, ExpertsOfOwnCode(module, _by_length))
    return y


def _numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The expert of each token in the order of experts, [N, 1]."""
    runs = [torch.full((length, 1), each, device=device) for each, length in enumerate(lengths)]
    return torch.cat(runs)


def _by_choice(module: nn.Module, x_ND: Tensor, lengths: Sequence[int]) -> Tensor:
    if not len(x_ND):
        return x_ND  # the code takes the shape of its result from the tokens
    index_N1 = _numbers(lengths, x_ND.device)
    y: Tensor = _own_forward(module)(x_ND, index_N1, x_ND.new_ones(index_N1.shape))
    return y.view_as(x_ND)


def _by_length(module: nn.Module, x_ND: Tensor, lengths: Sequence[int]) -> Tensor:
    y_ND: Tensor = _own_forward(module)(x_ND, list(lengths))
    return y_ND


def _own_forward(module: nn.Module) -> Callable[..., Tensor]:
    """The code of the model, in whose place a `Dispatch` is called."""
    return MethodType(type(module).forward, module)


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
            y_ND: Tensor = self._rows(module, x_ND, loads.lengths(len(x_ND)))
        finally:
            module.num_experts = whole
        if len(x_ND):
            return y_ND
        # no token: zeros, by which every expert has a gradient
        for param in module.parameters():
            y_ND = y_ND + param[:0].sum()
        return y_ND
