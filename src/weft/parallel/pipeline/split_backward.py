"""Owns the split backward: the gradient of the input first, the gradients of the weights later, for any block of torch code.

Note [Split backward]
    A stage runs forward under a `SplitBackward`. It is a mode of torch that sees every call of a torch function and tells three
    cases apart by the arguments (a weight is a parameter, or was made of parameters alone: a cast, a view, one expert's part):

        no weight, or weights only     runs as it is
        a product, by PRODUCTS         x ──[detach]── x' ──┐                     its own small graph is cut off at x'; the
                                                      weight ──[F.linear]── y'   outer graph holds one node in its place
        any other                      weight ──[gate]── [F.rms_norm, +, *] ── y   runs as it is on a stand-in of the weight

    Hence no parameter is left in the outer graph. Its backward is I: the node of a product asks the small graph for the
    gradient of x' alone and notes dy; a gate notes the gradient of its weight (norms and biases: cheap to compute, small
    to keep, and their input need not be kept). W is one backward through everything noted, from which nothing leads
    back to any x'. So each matrix product of a backward runs once, in I or in W, as in a whole backward: torch's own
    nodes compute only the gradients they are asked for. A collective stands in the outer graph and runs once, in I.

    I frees the outer graph as any backward does: attention, activation functions, gates of an MLP. Until W stay the
    inputs of products and the dy of their outputs, nothing else. W reaches parameters through autograd's own
    accumulation, once a parameter, so hooks on them run as in a whole backward, in the same order.

    What the mode cannot see is a `torch.autograd.Function` that takes a parameter in directly: its gradient arrives
    during I, right but early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from weft.parallel.model.tree import map_leaves, tensors_in

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear, F.bilinear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
        torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm,
        torch.einsum, torch.tensordot, F.grouped_mm,
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        F.embedding, F.embedding_bag, torch.index_select, Tensor.index_select, Tensor.__getitem__,
    }
)  # fmt: skip
"""Functions that yield one tensor and whose weight gradient is dear, or larger than what it is made of: it waits for W."""


class Debt(NamedTuple):
    """A weight gradient that waits: where it is computed, and the gradient that flows in there."""

    edge: GradientEdge
    gradient: Tensor


class SplitBackward(TorchFunctionMode):
    """The forward of one micro-batch through one stage, and the two halves of its backward. See Note [Split backward].

    split = SplitBackward(stage.parameters())
    with split:
        y = stage(x)
    torch.autograd.backward(y, dy)      # I: gradient of x
    split.backward_weights()            # W: gradients of the parameters
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self._params = tuple(param for param in params if param.requires_grad)
        self._weights = {id(param): param for param in self._params}
        self._gates: dict[int, Tensor] = {}
        self._debts: list[Debt] = []
        self._anchor = torch.empty((), requires_grad=True)

    def backward_weights(self) -> None:
        """W: the gradients of the parameters, as far as I has left them."""
        debts, self._debts = self._debts, []
        if debts:
            edges, gradients = zip(*debts, strict=True)
            del debts
            torch.autograd.backward(edges, gradients, inputs=self._params)

    def __exit__(self, *raised: Any) -> None:
        self._weights = {id(param): param for param in self._params}
        self._gates.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of `func`, for every function of torch."""
        kwargs = kwargs or {}
        if not (self._holds_weight(args) or self._holds_weight(kwargs.values())) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        data = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in self._weights]
        if not data or self._changes_weight(func, args):
            out = func(*args, **kwargs)
            self._follow(tensors_in((args[:1], out)), is_weight=not any(tensor.requires_grad for tensor in data))
            return out
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        return func(*map_leaves(args, Tensor, self._gate), **map_leaves(kwargs, Tensor, self._gate))

    def _holds_weight(self, items: Iterable[Any]) -> bool:
        """Whether a weight is among them, or in lists among them; asked at every call of torch, where `any` takes 3x as long."""
        for item in items:  # noqa: SIM110
            if id(item) in self._weights or (isinstance(item, (tuple, list)) and self._holds_weight(item)):
                return True
        return False

    def _changes_weight(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether `func` writes into a tensor that was made of weights."""
        name = getattr(func, "__name__", "")
        in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        return in_place and bool(args) and id(args[0]) in self._weights

    def _follow(self, touched: Iterable[Tensor], *, is_weight: bool) -> None:
        """Know what was made of weights for a weight, and no longer once an activation flowed in."""
        for tensor in touched:
            self._gates.pop(id(tensor), None)
            if is_weight and tensor.requires_grad:
                self._weights[id(tensor)] = tensor
            else:
                self._weights.pop(id(tensor), None)

    def _gate(self, tensor: Tensor) -> Tensor:
        """What stands for a weight in the outer graph; other tensors as they are."""
        if id(tensor) not in self._weights:
            return tensor
        if id(tensor) not in self._gates:
            gate = _Call(self._debts, get_gradient_edge(tensor))
            self._gates[id(tensor)] = _outer(gate, tensor, self._anchor)
        return self._gates[id(tensor)]

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        outside: list[Tensor] = []
        inside: list[GradientEdge] = []

        def cut(tensor: Tensor) -> Tensor:
            if id(tensor) in self._weights or not tensor.requires_grad:
                return tensor
            outside.append(tensor)
            source: Tensor = _Source.apply(self._anchor, tensor.detach())  # type: ignore[no-untyped-call]
            inside.append(get_gradient_edge(source))
            return source

        out: Tensor = func(*map_leaves(args, Tensor, cut), **map_leaves(kwargs, Tensor, cut))
        return _outer(_Call(self._debts, get_gradient_edge(out), inside), out, self._anchor, *outside)


def active_split_backward() -> SplitBackward | None:
    """The split that the running forward is under: what plays a forward again in its backward must do so under the same."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in modes if isinstance(mode, SplitBackward)), None)


IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


@dataclass(frozen=True)
class _Call:
    """What the node in the outer graph knows of a product or a gate: where its own graph begins and ends."""

    debts: list[Debt]
    edge: GradientEdge
    inside: list[GradientEdge] = field(default_factory=list)


def _outer(call: _Call, out: Tensor, *inputs: Tensor) -> Tensor:
    """`out` as the output of a node that has `inputs`; the first of them makes sure that the node is part of the graph."""
    y: Tensor = _Node.apply(call, out.detach(), *inputs)  # type: ignore[no-untyped-call]
    return y


class _Source(torch.autograd.Function):
    """Where a small graph begins: unlike a leaf the node does not hold x', so it is only kept by those who save it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, out: Tensor, anchor: Tensor, *activations: Tensor) -> Tensor:
        ctx.call = call
        return out.detach()  # no view to autograd, so that it may be written into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        call.debts.append(Debt(call.edge, dy))
        if not call.inside:
            return None, None, None
        return None, None, None, *_input_gradients(call, dy)


def _input_gradients(call: _Call, dy: Tensor) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(edge, inside, dy, retain_graph=True, allow_unused=True)` without its 30 us of checks."""
    run = torch.autograd.Variable._execution_engine.run_backward
    gradients: tuple[Tensor | None, ...] = run(
        (call.edge,), (dy,), True, False, tuple(call.inside), allow_unreachable=True, accumulate_grad=False
    )
    return gradients
