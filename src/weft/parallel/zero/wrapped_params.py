"""Which wrapper each parameter of a module belongs to, and checks of what wrappers cannot do."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.errors import DataError, Fault, PlanError

MOST_LISTED = 8
"""Keys that a fault lists."""
MARK = "_weft_wrapper"
"""Attribute of a parameter of a wrapped module: a weak reference to the wrapper."""


def mark_wrapped(params: Iterable[nn.Parameter], wrapper: nn.Module) -> None:
    """Note which wrapper reduces the gradients of these parameters."""
    mark = weakref.ref(wrapper)
    for param in params:
        setattr(param, MARK, mark)


def wrapper_of(param: torch.Tensor) -> nn.Module | None:
    """The wrapper that reduces the gradient of a parameter; None where there is none any more."""
    mark: weakref.ref[nn.Module] | None = getattr(param, MARK, None)
    return None if mark is None else mark()


def copied_state(module: nn.Module) -> dict[str, Any]:
    """A copy of a module's state dict."""
    state = module.state_dict()
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        state[key] = value.detach().clone() if is_tensor else copy.deepcopy(value)
    return state


def check_initialized(tensors: Iterable[tuple[str, torch.Tensor]], wrapper: str) -> None:
    """Reject parameters and buffers of lazy modules that have no shape yet.

    Raises:
        PlanError: there is one.
    """
    for name, tensor in tensors:
        if is_lazy(tensor):
            fault = Fault(
                wrapper,
                f"{name} of a lazy module has no shape yet",
                need="modules that have run once",
                fix="call the module with an example before: module(x)",
            )
            raise PlanError(fault)


def check_not_wrapped(module: nn.Module, wrapper: str) -> None:
    """Reject a module with a parameter whose gradient another wrapper reduces, or that has no shape yet.

    Raises:
        PlanError: the module, a module in it, or another one that shares a parameter was wrapped
            before; or a lazy module has not run.
    """
    check_initialized((*module.named_parameters(), *module.named_buffers()), wrapper)
    for name, param in module.named_parameters():
        other = wrapper_of(param)
        if other is None:
            continue
        fault = Fault(
            wrapper,
            f"{name} is a parameter of a wrapped module already",
            got=type(other).__name__,
            need="each parameter in one wrapper",
            fix="wrap one module that contains all of them, once",
        )
        raise PlanError(fault)


def check_all_wrapped(module: nn.Module, wrapper: nn.Module) -> None:
    """Reject a parameter that was registered after the module was wrapped.

    Raises:
        PlanError: no wrapper shards it and reduces its gradient.
    """
    for name, param in module.named_parameters():
        if wrapper_of(param) is not wrapper:
            fault = Fault(
                type(wrapper).__name__,
                f"{name} was added after the module was wrapped, so it is not sharded",
                fix="add or replace parameters before wrapping",
            )
            raise PlanError(fault)


def reject_pickle(wrapper: str, verb: str = "pickled") -> NoReturn:
    """Reject a pickle of a wrapped module.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        wrapper,
        f"a wrapped module cannot be {verb}: it would have no communication",
        fix="save net.state_dict(), or net.full_state_dict() for any number of ranks",
    )
    raise PlanError(fault)


def check_state(given: Mapping[str, torch.Tensor], known: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a state to be loaded has the keys and shapes of the wrapped module's
    `full_state_dict()`.

    Args:
        known: key -> shape.

    Raises:
        DataError: keys are missing or unknown, or a tensor has another shape.
    """
    given_keys = set(given)
    known_keys = set(known)
    wrong = sorted(given_keys ^ known_keys)
    if wrong:
        listed = ", ".join(wrong[:MOST_LISTED])
        fault = Fault(
            "state",
            f"missing or unknown keys: {listed}",
            got=f"{len(given_keys)} keys",
            need=f"the {len(known_keys)} of full_state_dict()",
            fix="load the state of the same module",
        )
        raise DataError(fault)
    for key, shape in known.items():
        # A copy would broadcast, and entries that are cut out of a flattened tensor of as many have
        # other places.
        if tuple(given[key].shape) != tuple(shape):
            fault = Fault(
                f"state: {key}",
                "has another shape",
                got=str(list(given[key].shape)),
                need=str(list(shape)),
                fix="load the state of the same module",
            )
            raise DataError(fault)
