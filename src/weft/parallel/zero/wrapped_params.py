"""Marks on the parameters of wrapped modules, and checks of use that would train other values than one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.errors import DataError, Fault, PlanError
from weft.parallel.zero.gradient_reducer import GradientReducer

WHOLE_PARAM_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon)
"""Classes of torch that update an entry by what the others of its parameter are."""
MOST_LISTED = 8
"""Keys that a fault lists."""
MARK = "_weft_wrapper"
"""Attribute of a parameter of a wrapped module: its `Mark`."""


@dataclass(frozen=True)
class Mark:
    """The wrapper of a parameter.

    Attributes:
        wrapper: name of the class.
        reducer: of the gradient that an optimizer takes; None: of an unsharded parameter, in whose
            place optimizers take a shard. Weak: see Note [Hooks hold no reducer].
        is_shard: whether it is this rank's entries of a parameter.
    """

    wrapper: str
    reducer: weakref.ref[GradientReducer] | None
    is_shard: bool


def mark_wrapped(
    params: Iterable[nn.Parameter],
    wrapper: str,
    *,
    reducer: GradientReducer | None,
    is_shard: bool = False,
) -> None:
    """Mark parameters of a wrapped module; see `Mark`."""
    weak_reducer = None if reducer is None else weakref.ref(reducer)
    mark = Mark(wrapper, weak_reducer, is_shard)
    for param in params:
        setattr(param, MARK, mark)


def mark_of(param: torch.Tensor) -> Mark | None:
    """The mark of a parameter of a wrapped module; None of others."""
    mark: Mark | None = getattr(param, MARK, None)
    return mark


def check_not_wrapped(module: nn.Module, wrapper: str) -> None:
    """Reject a module with a parameter whose gradient another wrapper reduces.

    Raises:
        PlanError: the module, a module in it, or another one that shares a parameter was wrapped
            before.
    """
    for name, param in module.named_parameters():
        mark = mark_of(param)
        if mark is None:
            continue
        fault = Fault(
            wrapper,
            f"{name} is a parameter of a wrapped module already",
            got=mark.wrapper,
            need="each parameter in one wrapper",
            fix="wrap one module that contains all of them, once",
        )
        raise PlanError(fault)


def check_all_wrapped(module: nn.Module, wrapper: str) -> None:
    """Reject a parameter that was registered after the module was wrapped.

    Raises:
        PlanError: no wrapper reduces its gradient.
    """
    for name, param in module.named_parameters():
        if mark_of(param) is None:
            fault = Fault(
                wrapper,
                f"{name} was added after the module was wrapped, so its gradient is not reduced",
                fix="add or replace parameters before wrapping",
            )
            raise PlanError(fault)


def check_not_sharded(params: Iterable[nn.Parameter], optimizer: str) -> None:
    """Reject shards for an optimizer that shards parameters itself.

    Raises:
        PlanError: a parameter is a shard.
    """
    for param in params:
        mark = mark_of(param)
        if mark is not None and mark.is_shard:
            fault = Fault(
                optimizer,
                f"these parameters are shards of {mark.wrapper}, which shards the states, too",
                need="whole parameters",
                fix="the plain optimizer, such as torch.optim.AdamW(net.parameters())",
            )
            raise PlanError(fault)


def trained_when_wrapped(module: nn.Module) -> dict[str, bool]:
    """Parameter name -> `requires_grad`."""
    return {name: param.requires_grad for name, param in module.named_parameters()}


def check_requires_grad(
    params: Iterable[tuple[str, nn.Parameter]],
    when_wrapped: Mapping[str, bool],
    wrapper: str,
) -> None:
    """Reject a parameter that was frozen or unfrozen after the module was wrapped.

    Raises:
        PlanError: `requires_grad` has changed: gradients are reduced in groups made before.
    """
    for name, param in params:
        need = when_wrapped[name]
        if param.requires_grad == need:
            continue
        fault = Fault(
            wrapper,
            f"requires_grad of {name} has changed since the module was wrapped",
            got=str(param.requires_grad),
            need=str(need),
            fix="set requires_grad before wrapping; to change it later, wrap a new module with "
            "the values of full_state_dict()",
        )
        raise PlanError(fault)


def reject_copy(wrapper: str) -> NoReturn:
    """Reject a copy or pickle of a wrapped module.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        wrapper,
        "a wrapped module cannot be copied or pickled",
        fix="copy the module before wrapping it, or keep full_state_dict()",
    )
    raise PlanError(fault)


def check_state_keys(given: Iterable[str], known: Iterable[str]) -> None:
    """Check that a state to be loaded has the keys of the wrapped module's `full_state_dict()`.

    Raises:
        DataError: keys are missing or unknown.
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


def reject_other_memory(name: str, wrapper: str) -> NoReturn:
    """Reject a parameter whose `.data` was replaced, which is a view into flat memory.

    Raises:
        PlanError: always.
    """
    fault = Fault(
        wrapper,
        f"{name} has other memory than before, so its values and updates would be lost",
        fix="change values in place: param.data.copy_(values); move or cast the module before",
    )
    raise PlanError(fault)


def _check_before_step(
    optimizer: torch.optim.Optimizer,
    args: Any,
    kwargs: Any,
) -> None:
    """Called before each optimizer step.

    Raises:
        PlanError: the optimizer has unsharded parameters, or cannot update shards, or gradients
            have arrived since the last `finish_gradient_synchronization`.
    """
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            mark = mark_of(param)
            if mark is None:
                continue
            if mark.reducer is None:
                _reject_unsharded(param, mark.wrapper)
            if mark.is_shard and isinstance(optimizer, WHOLE_PARAM_OPTIMIZERS):
                _reject_whole_param(optimizer, mark.wrapper)
            reducer = mark.reducer()
            if reducer is not None and reducer.has_unfinished_gradients:
                _reject_unsynchronized(mark.wrapper)


def _reject_unsharded(param: nn.Parameter, wrapper: str) -> NoReturn:
    shape = list(param.shape)
    fault = Fault(
        wrapper,
        "the optimizer was made before the module was wrapped, so it would update nothing",
        got=f"an unsharded parameter of shape {shape}",
        need="the shards",
        fix=f"make the optimizer from net.parameters() after net = {wrapper}(...)",
    )
    raise PlanError(fault)


def _reject_whole_param(optimizer: torch.optim.Optimizer, wrapper: str) -> NoReturn:
    fault = Fault(
        wrapper,
        "the optimizer updates a parameter as a whole, so it cannot update a shard of it",
        got=type(optimizer).__name__,
        need="one that updates every entry by itself, as SGD and AdamW do",
        fix="DistributedDataParallel, which has whole parameters",
    )
    raise PlanError(fault)


def _reject_unsynchronized(wrapper: str) -> NoReturn:
    fault = Fault(
        wrapper,
        "the gradients of the last backward were not synchronised before this optimizer step",
        fix="call finish_gradient_synchronization() after the last backward of a step",
    )
    raise PlanError(fault)


# One hook for all optimizers: a wrapper does not know one that was made before it, or will be made later.
register_optimizer_step_pre_hook(_check_before_step)
