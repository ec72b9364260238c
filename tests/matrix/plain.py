"""Mixed precision on one device in plain torch, under any order of summation: the reference of layouts in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.matrix.layouts import CLIP, SEED, Case, adamw
from tests.one_device import plain_model
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward
from weft.models.common.init import named_parameters
from weft.train.optim import matrices


@dataclass(frozen=True)
class Dtypes:
    """The three types of a precision policy, by name."""

    params: str
    compute: str
    reduce: str

    def __getitem__(self, key: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, getattr(self, key))
        return dtype

    def __str__(self) -> str:
        return f"{self.params}-{self.compute}-{self.reduce}"


MIXED = Dtypes("float32", "bfloat16", "float32")
PURE = Dtypes("bfloat16", "bfloat16", "bfloat16")
HALF = Dtypes("float32", "float16", "float32")


class InParts(TorchFunctionMode):
    """Every linear is computed in parts of its input features, as row-parallel ranks would, or of
    its output features.

    Parts of the input are rounded to the type of compute before they are added, and so are, in the
    backward, the input gradients of parts of the output.
    """

    def __init__(self, num: int, *, dim: int) -> None:
        super().__init__()
        self.num, self.dim = num, dim

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear or args[1].shape[self.dim] % self.num:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        weights = weight.chunk(self.num, self.dim)
        if self.dim == 1:
            parts = x.chunk(self.num, -1)
            y: Tensor = sum(map(F.linear, parts, weights))
        else:
            y = torch.cat([F.linear(x, part) for part in weights], -1)
        has_bias = len(args) > 2 and args[2] is not None
        return y + args[2] if has_bias else y


@dataclass(frozen=True)
class Order:
    """An order of summation: sequences a forward (None: all), the order of sequences, parts of
    linears.
    """

    micro: int | None = None
    backwards: bool = False
    parts: tuple[int, int] | None = None

    def rows(self, number: int) -> tuple[Tensor, ...]:
        """Which sequences each forward takes."""
        rows = torch.arange(number)
        return (rows.flip(0) if self.backwards else rows).split(self.micro or number)


PLAIN = Order()
ORDERS = (
    Order(micro=1),
    Order(micro=2),
    Order(micro=1, backwards=True),
    Order(backwards=True),
    Order(micro=1, parts=(2, 1)),
    Order(parts=(4, 1)),
    Order(parts=(2, 0)),
    Order(micro=2, parts=(4, 0)),
)


@dataclass
class Replica:
    """A model in the type of compute, and the values that an optimizer moves in another."""

    blocks: dict[str, nn.Module]
    params: dict[str, nn.Parameter]
    values: dict[str, Tensor]

    @staticmethod
    def make(case: Case, dtypes: Dtypes) -> Replica:
        family = FAMILIES[case.family]
        blocks = plain_model(family, case.config, seed=SEED, dtype=torch.float32)
        ties = family.ties(case.config)
        values = {
            name: param.detach().to(dtypes["params"], copy=True)
            for name, param in named_parameters(blocks).items()
            if name not in ties
        }
        low = copy.deepcopy(nn.ModuleDict(blocks)).to(dtypes["compute"])
        params = {name: param for name, param in named_parameters(low).items() if name not in ties}
        return Replica(dict(low.items()), params, values)

    def refresh(self) -> None:
        """Round the values for the model."""
        with torch.no_grad():
            for name, value in self.values.items():
                self.params[name].copy_(value)


def train(
    case: Case, steps: Sequence[Batch], dtypes: Dtypes, order: Order, *, lr: float
) -> list[float]:
    """Losses of training on one device."""
    replica = Replica.make(case, dtypes)
    optimizer = adamw(replica.values, matrices(replica.params))
    losses = []
    for whole in steps:
        replica.refresh()
        loss, gradients = _gradients(replica, whole, dtypes, order)
        squares = torch.zeros((), dtype=torch.float64)
        for gradient in gradients.values():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            squares += gradient.to(wide).norm().double().square()
        norm = squares**0.5
        for name, value in replica.values.items():
            factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
            value.grad = gradients[name].to(value.dtype).mul_(factor)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        losses.append(loss)
    return losses


def _gradients(
    replica: Replica, whole: Batch, dtypes: Dtypes, order: Order
) -> tuple[float, dict[str, Tensor]]:
    sums = {
        name: torch.zeros_like(value, dtype=dtypes["reduce"])
        for name, value in replica.values.items()
    }
    total = 0.0
    targets = whole.num_targets().double()
    for rows in order.rows(len(whole.inputs)):
        with InParts(order.parts[0], dim=order.parts[1]) if order.parts else nullcontext():
            loss = forward(replica.blocks, whole.rows(rows))
        loss.backward((1 / targets).to(loss.dtype))
        total += loss.item()
        for name, param in replica.params.items():
            assert param.grad is not None, f"{name} takes part in every forward"
            sums[name].add_(param.grad)
            param.grad = None
    return total / targets.item(), sums
