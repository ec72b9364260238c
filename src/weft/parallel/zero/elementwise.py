"""Which state of an optimizer has a value for each entry: found by trial steps, which also reject other optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import Fault, PlanError, first_line

PART_SIZES = (5, 7)
"""Entries of the two parts of the trial parameter."""
TRIAL_SHAPE = (4, 3)
NUM_TRIAL_STEPS = 2


def elementwise_state_keys(
    make: Callable[[list[nn.Parameter]], Optimizer],
    *,
    device: torch.device,
) -> frozenset[str]:
    """State keys with a value for each entry, of an optimizer that is seen to update each entry by
    itself.

    It takes two steps on a parameter, and on the same parameter in two parts.

    Raises:
        PlanError: the two do not end with the same values.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(
        1 + NUM_TRIAL_STEPS,
        *TRIAL_SHAPE,
        dtype=torch.float32,
        generator=generator,
    )
    start, *gradients = drawn.to(device)
    unsharded = nn.Parameter(start.clone())
    parts: list[nn.Parameter] = []
    for values in _parts_of(start):
        parts.append(nn.Parameter(values.clone()))
    try:
        reference = make([unsharded])
        sharded = make(parts)
        for gradient in gradients:
            unsharded.grad = gradient
            for part, part_gradient in zip(parts, _parts_of(gradient), strict=True):
                part.grad = part_gradient
            reference.step()
            sharded.step()
    except (TypeError, ValueError) as error:  # it needs a closure, or other shapes
        message = first_line(error)
        raise PlanError(_not_elementwise(f"it raises {message!r}")) from error
    joined = torch.cat([part.detach() for part in parts])
    expected = unsharded.detach().flatten()
    if not torch.allclose(expected, joined, rtol=1e-5):
        raise PlanError(_not_elementwise("the same steps in two parts gave other values"))
    keys: set[str] = set()
    for key, value in reference.state[unsharded].items():
        if isinstance(value, Tensor) and value.shape == unsharded.shape:
            keys.add(key)
    return frozenset(keys)


def _parts_of(x: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = x.flatten().split(PART_SIZES)
    return parts


def _not_elementwise(got: str) -> Fault:
    return Fault(
        "optimizer",
        "updates a parameter as a whole, so it cannot update a shard of it",
        got=got,
        need="one that updates every entry by itself, as SGD and AdamW do",
    )
