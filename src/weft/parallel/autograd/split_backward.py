"""Split backward for zero-bubble schedules: input gradients first (I), weight gradients later (W), for any torch code.

Note [Split backward]
    A stage runs forward under `SplitBackward`, a mode of torch that sees every call of a torch
    function and tells three cases apart by the arguments. (A weight is a parameter, or was made of
    parameters alone: a cast, a view, one expert's part.)

        no weight, or weights only     runs as it is
        a product, in PRODUCTS         x ──[detach]── x' ──┐                     its own inner graph is cut off at x'; the
                                                      weight ──[F.linear]── y'   outer graph holds one node in its place
        any other                      weight ──[proxy]── [F.rms_norm, +, *] ── y  runs as it is on a proxy of the weight

    Hence no parameter is left in the outer graph. Its backward is I: the node of a product asks the
    inner graph for the gradient of x' alone and keeps dy; a proxy keeps the gradient of its weight
    (norms and biases: cheap to compute, small to keep, and their input need not be kept). W is one
    backward through everything kept, from which nothing leads back to any x'. So each matrix
    product of a backward runs once, in I or in W, as in a whole backward: torch's own nodes compute
    only the gradients they are asked for. A collective is part of the outer graph and runs once, in
    I.

    I frees the outer graph as any backward does: attention, activation functions, the other factor
    of a gated MLP. Until W the inputs of products and the dy of their outputs stay, nothing else. W
    reaches parameters through autograd's own accumulation, once a parameter, so hooks on them run
    as in a whole backward, in the same order.

    What the mode cannot see is a `torch.autograd.Function` that takes a parameter directly: its
    gradient arrives during I, right but early. So does that of what `torch.func` transforms (vmap, grad),
    which takes no nodes of this kind.

    A forward may itself ask for gradients of its input (`torch.autograd.grad`, as models of forces
    do). Such a backward is no part of I: it defers nothing. One that is differentiated again is
    rejected, since the outer graph ends at the nodes of products.

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from weft.errors import Fault, PlanError
from weft.models.common.fp8_experts import fp8_expert_linear
from weft.models.common.linear_products import fp8_linear
from weft.parallel.autograd.tree import map_leaves, tensors_in

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear, fp8_linear, fp8_expert_linear, F.bilinear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
        torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm,
        torch.einsum, torch.tensordot, torch._grouped_mm,
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        F.embedding, F.embedding_bag, torch.index_select, Tensor.index_select, Tensor.__getitem__,
    }
)  # fmt: skip
"""Functions that return one tensor and whose weight gradient is expensive, or larger than what it
is made of: deferred to W.
"""

IN_PLACE = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
)
"""Functions that write into their first argument and whose name does not end in one underscore."""


class DeferredWGrad(NamedTuple):
    """A weight gradient that W will compute: where its graph begins, and the gradient of what that
    graph returned.
    """

    edge: GradientEdge
    gradient: Tensor


def _reject(what: str) -> NoReturn:
    fault = Fault(
        "pipeline.schedule",
        f"a block {what}, and its backward is split",
        fix="a schedule without split backwards, such as 1f1b or interleaved",
    )
    raise PlanError(fault)


class SplitBackward(TorchFunctionMode):
    """The forward of one micro-batch through one stage, and the two parts of its backward. See Note
    [Split backward].

    split = SplitBackward(stage.parameters())
    with split:
        y = stage(x)
    torch.autograd.backward(y, dy)      # I: gradient of x
    split.backward_weights()            # W: gradients of the parameters
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self._params = tuple(param for param in params if param.requires_grad)
        self._weights = self._params_by_id()
        self._proxies: dict[int, Tensor] = {}
        self._pending_wgrads: list[DeferredWGrad] = []
        self._grad_root = torch.empty((), requires_grad=True)
        self._is_forward = False

    def defer(self, wgrad: DeferredWGrad) -> None:
        """Have W compute a weight gradient, unless the backward is one that the forward runs itself.

        Raises:
            PlanError: that backward is to be differentiated again.
        """
        if not self._is_forward:
            self._pending_wgrads.append(wgrad)
        elif torch.is_grad_enabled():
            _reject("differentiates in its forward with create_graph=True")

    def __enter__(self) -> SplitBackward:
        self._is_forward = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _params_by_id(self) -> dict[int, Tensor]:
        return {id(param): param for param in self._params}

    def backward_weights(self) -> None:
        """W: the gradients of the parameters that I has left pending."""
        pending = self._pending_wgrads
        self._pending_wgrads = []
        if not pending:
            return
        edges = [wgrad.edge for wgrad in pending]
        gradients = [wgrad.gradient for wgrad in pending]
        del pending
        torch.autograd.backward(edges, gradients, inputs=self._params)

    def __exit__(self, *raised: Any) -> None:
        self._is_forward = False
        self._weights = self._params_by_id()
        self._proxies.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `func`, for every function of torch."""
        kwargs = kwargs or {}
        has_weight = self._has_weight(args) or self._has_weight(kwargs.values())
        if func is torch.autograd.grad and has_weight:
            _reject("differentiates in its forward with regard to its weights")
        if not has_weight or not torch.is_grad_enabled() or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        activations = [
            tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in self._weights
        ]
        if not activations or self._writes_weight(func, args):
            out = func(*args, **kwargs)
            is_weight = not any(tensor.requires_grad for tensor in activations)
            self._classify(tensors_in((args[:1], out)), is_weight=is_weight)
            return out
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        proxied_args = map_leaves(args, Tensor, self._proxy)
        proxied_kwargs = map_leaves(kwargs, Tensor, self._proxy)
        return func(*proxied_args, **proxied_kwargs)

    def _has_weight(self, items: Iterable[Any]) -> bool:
        """Whether a weight is among them, or in lists among them; on every call of torch, where
        `any` takes 3x as long.
        """
        for item in items:
            if id(item) in self._weights:
                return True
            if isinstance(item, (tuple, list)) and self._has_weight(item):
                return True
        return False

    def _writes_weight(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether `func` writes into a tensor that was made of weights."""
        if not args:
            return False
        target = args[0]
        if id(target) not in self._weights:
            return False
        name = getattr(func, "__name__", "")
        if name in IN_PLACE:
            return True
        return name.endswith("_") and not name.endswith("__")

    def _classify(self, touched: Iterable[Tensor], *, is_weight: bool) -> None:
        """Count tensors made of weights among the weights, and no longer once an activation was
        written into them.
        """
        for tensor in touched:
            key = id(tensor)
            self._proxies.pop(key, None)
            if is_weight and tensor.requires_grad:
                self._weights[key] = tensor
            else:
                self._weights.pop(key, None)

    def _proxy(self, tensor: Tensor) -> Tensor:
        """The tensor that replaces a weight in the outer graph; other tensors as they are."""
        key = id(tensor)
        if key not in self._weights:
            return tensor
        proxy = self._proxies.get(key)
        if proxy is None:
            edge = get_gradient_edge(tensor)
            inner = _InnerGraph(self, edge, inputs=())
            proxy = _outer_output(inner, tensor, self._grad_root)
            self._proxies[key] = proxy
        return proxy

    def _product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Run a product on inputs cut off from the outer graph, with one node in the outer graph in
        its place.
        """
        outer_inputs: list[Tensor] = []
        inner_inputs: list[GradientEdge] = []

        def cut(tensor: Tensor) -> Tensor:
            if id(tensor) in self._weights or not tensor.requires_grad:
                return tensor
            outer_inputs.append(tensor)
            inner: Tensor = _InnerInput.apply(self._grad_root, tensor.detach())  # type: ignore[no-untyped-call]
            inner_inputs.append(get_gradient_edge(inner))
            return inner

        inner_args = map_leaves(args, Tensor, cut)
        inner_kwargs = map_leaves(kwargs, Tensor, cut)
        out: Tensor = func(*inner_args, **inner_kwargs)
        inner = _InnerGraph(self, get_gradient_edge(out), inputs=tuple(inner_inputs))
        return _outer_output(inner, out, self._grad_root, *outer_inputs)


def active_split_backward() -> SplitBackward | None:
    """The split that the running forward is under: a forward that is recomputed in the backward
    must run under the same.
    """
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, SplitBackward):
            return mode
    return None


@dataclass(frozen=True)
class _InnerGraph:
    """The graph of a product, or of a weight behind a proxy, as its node in the outer graph sees
    it.

    Attributes:
        split: takes what W will compute.
        edge: of what the graph returned.
        inputs: where the graph was cut off from the outer one.
    """

    split: SplitBackward
    edge: GradientEdge
    inputs: tuple[GradientEdge, ...]

    def input_gradients(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad(edge, inputs, dy, retain_graph=True, allow_unused=True)` without its
        30 us of checks.
        """
        run_backward = torch.autograd.Variable._execution_engine.run_backward
        keep_graph, create_graph = True, False
        gradients: tuple[Tensor | None, ...] = run_backward(
            (self.edge,),
            (dy,),
            keep_graph,
            create_graph,
            self.inputs,
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return gradients


def _outer_output(inner: _InnerGraph, out: Tensor, grad_root: Tensor, *inputs: Tensor) -> Tensor:
    """`out` as the output of a node of the outer graph that has `inputs`; `grad_root` makes sure
    that there is a node.
    """
    y: Tensor = _OuterNode.apply(inner, out.detach(), grad_root, *inputs)  # type: ignore[no-untyped-call]
    return y


class _InnerInput(torch.autograd.Function):
    """Where an inner graph begins. Unlike a leaf the node does not hold x', so only those that save
    x' keep it allocated.
    """

    @staticmethod
    def forward(ctx: Any, grad_root: Tensor, x: Tensor) -> Tensor:
        return x.detach()


class _OuterNode(torch.autograd.Function):
    """The node of the outer graph in place of an inner graph: input gradients now, weight gradients
    in W.
    """

    @staticmethod
    def forward(
        ctx: Any, inner: _InnerGraph, out: Tensor, grad_root: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.inner = inner
        return out.detach()  # not a view to autograd, so that it may be written into

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inner: _InnerGraph = ctx.inner
        inner.split.defer(DeferredWGrad(inner.edge, dy))
        if not inner.inputs:
            return None, None, None
        return None, None, None, *inner.input_gradients(dy)
