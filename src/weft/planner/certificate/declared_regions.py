"""Modules whose operations depend on the rank's place: what they take and give along each axis is declared, forward and backward.

module                       along   takes                          gives                     inside
Attend                       cp      columns: q, k, v sharded       as q                      nothing is typed
                             tp      heads: q sharded               as q; of k and v that
                                     or all replicated              are whole: partial gradients
HeadsOfRank                  tp      replicated                     sharded in the heads      varying
VocabParallelEmbedding       tp      tokens replicated              what `region.leave` gives varying
VocabParallelLoss            tp      logits sharded in V            replicated                varying
ExpertParallelDispatch       ep      tokens sharded                 as its tokens             varying
ShardedBalance               tp      scores replicated              counts on the first rank  typed
ChunkedLosses                any     tokens sharded, or weight      as its tokens; replicated nothing is typed
                                     sharded in V                   along the axis of V
PreferenceLoss               cp      columns: logits sharded        a share of the loss       typed

Inside, tensors are "varying" along these axes, and typed as everywhere along the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.common.head_output import ChunkedLosses, set_head_output
from weft.models.common.preference import PreferenceLoss
from weft.parallel.context.position_sum import ContextPositionSum
from weft.parallel.cp import AXIS as CP
from weft.parallel.ep import AXIS as EP
from weft.parallel.expert.dispatch import ExpertParallelDispatch, ShardedBalance
from weft.parallel.model.dropout_blocks import block_as_written
from weft.parallel.tensor.dims import DimFactor, is_sharded, whole_dim, whole_dims, with_dim
from weft.parallel.tensor.transform import HeadsOfRank
from weft.parallel.tensor.vocab import (
    VocabParallelEmbedding,
    VocabParallelLoss,
    VocabParallelPreferenceLoss,
)
from weft.parallel.tp import AXIS as TP
from weft.planner.certificate.axis_types import (
    PARTIAL,
    VARYING,
    AxisType,
    Types,
    of_dims,
    replicated,
)
from weft.planner.certificate.type_mode import TypeMode

COLUMNS = 1
"""Dim of the columns of q_BSHK."""
Declare = Callable[[Tensor], None]
"""Notes the types of a tensor that has just been made."""


class _Declared(torch.autograd.Function):
    """Identity whose result, and whose gradient, get the types that are declared."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mode: TypeMode, declare: Declare, declare_gradient: Declare
    ) -> Tensor:
        ctx.mode = mode
        ctx.declare_gradient = declare_gradient
        with mode.paused():
            out = x.clone()
        declare(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.mode.paused():
            out = gradient.clone()
        ctx.mode.set(out, ctx.mode.types_of(gradient))
        ctx.declare_gradient(out)
        return out, None, None, None


def declared(x: Tensor, mode: TypeMode, declare: Declare, declare_gradient: Declare) -> Tensor:
    """x with other types from here on, and for its gradient from there on."""
    if x.requires_grad:
        out: Tensor = _Declared.apply(x, mode, declare, declare_gradient)  # type: ignore[no-untyped-call]
        return out
    with mode.paused():
        out = x.clone()
    declare(out)
    return out


class DeclaredRegions:
    """Declares the types of a step's modules.

    Args:
        mode: types the step.
        index: this rank's place along an axis.
        num_calls: of collectives and messages so far.
    """

    def __init__(
        self, mode: TypeMode, *, index: Callable[[str], int], num_calls: Callable[[], int]
    ) -> None:
        self.mode = mode
        self.index = index
        self.num_calls = num_calls
        self.declared_params: dict[int, str] = {}
        self._wrapped: set[nn.Module] = set()
        self._whole_positions: Tensor | None = None

    def wrap(self, name: str, block: nn.Module) -> None:
        """Declare the modules of a block, and note in the mode which module runs."""
        for path, module in block_as_written(block).named_modules():
            if module in self._wrapped:
                continue  # several blocks hold it
            self._wrapped.add(module)
            wrapper = self._wrapper(module)
            if wrapper is not None:
                module.forward = functools.partial(wrapper, module, module.forward)
            output = getattr(module, "head_output", None)
            if isinstance(output, ChunkedLosses):
                typed = _TypedLosses(
                    output.vocabulary, output.is_ahead, declare=self._chunked_losses
                )
                set_head_output(module, typed)
            where = ".".join(part for part in (name, path) if part)
            module.register_forward_pre_hook(functools.partial(self._enter, where), prepend=True)
        reads_vocab = any(isinstance(each, VocabParallelEmbedding) for each in block.modules())
        if TP in self.mode.axes and reads_vocab:
            block.register_forward_pre_hook(self._before_positions, prepend=True)
            block.register_forward_pre_hook(self._after_positions)

    def _before_positions(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        """With sequence parallelism a hook of the block selects this rank's positions."""
        self._whole_positions = _positions_in(args)

    def _after_positions(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        own, whole = _positions_in(args), self._whole_positions
        if own is None or whole is None or own is whole:
            return
        types = []
        for axis, one in zip(self.mode.axes, self.mode.types_of(whole), strict=True):
            is_part = axis == TP or is_sharded(one.dims[1])
            columns = (DimFactor(own.shape[1], sharded=is_part),)
            types.append(of_dims(with_dim(one.dims, 1, columns)))
        self._set(own, tuple(types))

    def _enter(self, where: str, module: nn.Module, args: object) -> None:
        self.mode.where = where

    def _wrapper(self, module: nn.Module) -> Callable[..., Any] | None:
        if isinstance(module, Attend):
            return self._attend
        if isinstance(module, HeadsOfRank):
            return self._heads
        if isinstance(module, VocabParallelEmbedding):
            return self._embedding
        if isinstance(module, VocabParallelPreferenceLoss):
            return self._vocab_preference_loss
        if isinstance(module, VocabParallelLoss):
            return self._loss
        if isinstance(module, PreferenceLoss):
            return self._preference_loss
        if isinstance(module, ExpertParallelDispatch):
            return self._dispatch
        if isinstance(module, ShardedBalance):
            return self._balance
        return None

    # attention

    def _attend(
        self,
        attend: Attend,
        forward: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Any,
    ) -> Tensor:
        mode = self.mode
        types = [mode.types_of(x) for x in (q, k, v)]
        self._check_attention(types)
        free: Types = (VARYING,) * len(mode.axes)
        gradients = list(_gradients_of(types))
        inputs = []
        for number, x in enumerate((q, k, v)):

            def end(out: Tensor, number: int = number) -> None:
                self._end_backward(gradients[number], out)

            inputs.append(declared(x, mode, lambda out: self._set(out, free), end))
        for param in (attend.sinks, attend.head_bias):
            if param is not None:
                self.declared_params.setdefault(id(param), "attention")
        before = self.num_calls()
        with mode.paused():
            raw = forward(*inputs, batch)
        mode.set(raw, free)
        for axis, one in zip(mode.axes, types[0], strict=True):
            is_columns = one.kind == "sharded" and is_sharded(one.dims[COLUMNS])
            if is_columns and self.num_calls() == before:
                mode.report(axis, "attention of sharded columns calls no other rank")
        out_types: Types = tuple(_with_last(one, raw.shape[-1]) for one in types[0])
        return declared(
            raw,
            mode,
            lambda out: self._set(out, out_types),
            lambda out: self._check_gradient(out, out_types, free, gradients),
        )

    def _check_attention(self, types: Sequence[Types]) -> None:
        for place, axis in enumerate(self.mode.axes):
            q, k, v = (each[place] for each in types)
            for name, one in (("queries", q), ("keys", k), ("values", v)):
                if one.kind in ("partial", "varying"):
                    self.mode.report(axis, f"attention reads {name} that are {one.text}")
            if k.kind == "sharded" and q.kind == "replicated":
                self.mode.report(axis, f"attention of replicated queries with keys {k.text}")
            is_columns = (
                k.kind == "replicated" and q.kind == "sharded" and is_sharded(q.dims[COLUMNS])
            )
            if is_columns:
                self.mode.report(
                    axis, "attention of sharded columns reads keys that are replicated"
                )

    def _check_gradient(
        self, out: Tensor, expected: Types, free: Types, gradients: list[Types]
    ) -> None:
        """Of a partial gradient of whole sequences, those of queries, keys and values are partial."""
        for place, axis in enumerate(self.mode.axes):
            got = self.mode.types_of(out)[place]
            if got.kind == "partial" and expected[place].kind == "replicated" and axis == CP:
                gradients[:] = [(*t[:place], PARTIAL, *t[place + 1 :]) for t in gradients]
            elif got.kind not in (expected[place].kind, "zero", "untyped"):
                what = f"the gradient of attention is {got.text}, its result {expected[place].text}"
                self.mode.report(axis, what)
        self._set(out, free)
        self.mode.is_declared = True  # until a gradient of q, k or v is complete

    def _end_backward(self, types: Types, out: Tensor) -> None:
        self.mode.is_declared = False
        self._set(out, types)

    def _heads(
        self, module: Any, forward: Callable[..., Tensor], x: Tensor, dim: int, number: int
    ) -> Tensor:
        taken = self._type(x, TP)
        if taken is not None and not taken.is_same_everywhere:
            self.mode.report(TP, f"a rank's heads are taken of a tensor that is {taken.text}")
        partial = self._replaced(self.mode.types_of(x), {TP: PARTIAL})
        out = forward(self._freed(x, (TP,), gradient=partial), dim, number)
        heads = (DimFactor(number, sharded=True),)
        dims = with_dim(whole_dims(tuple(out.shape)), dim, heads)
        return self._restored(out, (TP,), {TP: of_dims(dims)})

    # vocabulary

    def _embedding(self, module: Any, forward: Callable[..., Tensor], tokens: Tensor) -> Tensor:
        return forward(self._freed(tokens, (TP,)))

    def _loss(
        self, module: Any, forward: Callable[..., Tensor], logits: Tensor, batch: Any
    ) -> Tensor:
        if logits.dim() == batch.targets.dim():
            return forward(logits, batch)  # losses of a head
        one = self._type(logits, TP)
        if one is not None:
            is_vocab = one.kind == "sharded" and is_sharded(one.dims[-1])
            if not is_vocab and one.kind != "untyped":
                self.mode.report(
                    TP, f"the vocabulary-parallel loss reads logits that are {one.text}"
                )
        own = self.mode.types_of(logits)
        freed = self._freed(logits, (TP,), gradient=own)
        out = forward(freed, batch)
        result = self._type(out, TP)
        if result is not None and result.kind not in ("replicated", "untyped"):
            self.mode.report(TP, f"the vocabulary-parallel loss is {result.text}, not replicated")
        return self._restored(out, (TP,), {TP: replicated(tuple(out.shape))})

    def _chunked_losses(
        self,
        forward: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        mode = self.mode
        out_types, x_types, weight_types = [], [], []
        for axis, of_x, of_weight in zip(
            mode.axes, mode.types_of(x), mode.types_of(weight), strict=True
        ):
            is_vocab = of_weight.kind == "sharded" and is_sharded(of_weight.dims[0])
            problem = _problem_of_product(of_x, of_weight, is_vocab=is_vocab)
            if problem:
                mode.report(axis, f"losses of a head whose {problem}")
            has_tokens = of_x.kind == "sharded"
            out = of_dims(of_x.dims[:-1]) if has_tokens else replicated(tuple(targets.shape))
            out_types.append(out)
            x_types.append(PARTIAL if is_vocab else of_x)
            weight_types.append(PARTIAL if has_tokens else of_weight)
        free: Types = (VARYING,) * len(mode.axes)
        inputs: list[Tensor | None] = []
        for operand, gradient in ((x, x_types), (weight, weight_types), (bias, weight_types)):
            if operand is None:
                inputs.append(None)
                continue
            end = functools.partial(self._end_backward, tuple(gradient))
            inputs.append(declared(operand, mode, lambda one: self._set(one, free), end))
        with mode.paused():
            raw = forward(*inputs, targets)
        mode.set(raw, free)
        types = tuple(out_types)
        return declared(
            raw,
            mode,
            lambda out: self._set(out, types),
            lambda out: self._begin_losses_backward(out, free),
        )

    def _begin_losses_backward(self, out: Tensor, free: Types) -> None:
        for axis, one in zip(self.mode.axes, self.mode.types_of(out), strict=True):
            if one.kind in ("partial", "varying"):
                self.mode.report(axis, f"the gradient of losses is {one.text}")
        self._set(out, free)
        self.mode.is_declared = True  # until the gradient of an operand is complete

    def _vocab_preference_loss(
        self, module: Any, forward: Callable[..., Tensor], logits: Tensor, batch: Any
    ) -> Tensor:
        of_vocab = functools.partial(self._loss, module, forward)
        return self._preference_loss(module, of_vocab, logits, batch)

    def _preference_loss(
        self, module: Any, forward: Callable[..., Tensor], logits: Tensor, batch: Any
    ) -> Tensor:
        """Each rank that shares sequences computes the loss of whole pairs divided by their number."""
        out = forward(logits, batch)
        one = self._type(out, CP)
        if one is None or not isinstance(module.position_sum, ContextPositionSum):
            return out
        if one.kind not in ("replicated", "untyped"):
            self.mode.report(CP, f"the loss of whole pairs is {one.text}, not replicated")
        share = self._replaced(self.mode.types_of(out), {CP: PARTIAL})
        return declared(out, self.mode, lambda x: self._set(x, share), lambda gradient: None)

    # experts

    def _dispatch(
        self,
        module: Any,
        forward: Callable[..., Tensor],
        x: Tensor,
        experts_NK: Tensor,
        weights: Tensor,
        experts: nn.Module,
    ) -> Tensor:
        tokens = self._type(x, EP)
        own = self.mode.types_of(x)
        own_weights = self.mode.types_of(weights)
        out = forward(
            self._freed(x, (EP,), gradient=own),
            self._freed(experts_NK, (EP,)),
            self._freed(weights, (EP,), gradient=own_weights),
            experts,
        )
        if tokens is None:
            return out
        return self._restored(out, (EP,), {EP: tokens})

    def _balance(
        self, module: Any, forward: Callable[..., Tensor | None], scores: Tensor, batch: Any
    ) -> Tensor | None:
        if self._type(scores, TP) is None:
            return forward(scores, batch)

        def partial_gradient(out: Tensor) -> None:
            self._set(out, self._replaced(self.mode.types_of(out), {TP: PARTIAL}))

        types = self.mode.types_of(scores)
        out = forward(
            declared(scores, self.mode, lambda x: self._set(x, types), partial_gradient), batch
        )
        if out is not None and self.index(TP) > 0:
            self.mode.report(TP, "the balance loss of the same tokens is counted on every rank")
        return out

    # types

    def _type(self, x: Tensor, axis: str) -> AxisType | None:
        """The type along an axis; None where it has one rank."""
        return self.mode.type_of(x, axis) if axis in self.mode.axes else None

    def _set(self, x: Tensor, types: Types) -> None:
        self.mode.set(x, types)

    def _replaced(self, types: Types, changes: Mapping[str, AxisType]) -> Types:
        found = []
        for axis, one in zip(self.mode.axes, types, strict=True):
            found.append(changes.get(axis, one))
        return tuple(found)

    def _freed(self, x: Tensor, axes: Collection[str], *, gradient: Types | None = None) -> Tensor:
        """x, varying along these axes; its gradient has these types there."""
        if not set(axes) & set(self.mode.axes):
            return x
        free = self._replaced(self.mode.types_of(x), dict.fromkeys(axes, VARYING))

        def declare_gradient(out: Tensor) -> None:
            own = dict(zip(self.mode.axes, gradient or (), strict=False))
            back = {axis: own[axis] for axis in axes if axis in own}
            self._set(out, self._replaced(self.mode.types_of(out), back))

        return declared(x, self.mode, lambda out: self._set(out, free), declare_gradient)

    def _restored(self, x: Tensor, axes: Collection[str], types: Mapping[str, AxisType]) -> Tensor:
        """The result of a region; its gradient is varying along these axes inside."""
        if not set(axes) & set(self.mode.axes):
            return x
        given = self._replaced(self.mode.types_of(x), types)

        def declare_gradient(out: Tensor) -> None:
            free = self._replaced(self.mode.types_of(out), dict.fromkeys(axes, VARYING))
            self._set(out, free)

        return declared(x, self.mode, lambda out: self._set(out, given), declare_gradient)


@dataclass(frozen=True)
class _TypedLosses(ChunkedLosses):
    """`ChunkedLosses` whose types are declared."""

    declare: Callable[..., Tensor] = field(kw_only=True)

    def losses(
        self, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_BS: Tensor
    ) -> Tensor:
        return self.declare(super().losses, x_BSD, weight_VD, bias_V, targets_BS)


def _problem_of_product(x: AxisType, weight: AxisType, *, is_vocab: bool) -> str:
    """Why x W^T does not have the types of its tokens, or of W's rows; empty: it has."""
    for name, one in (("input", x), ("weight", weight)):
        if one.kind in ("partial", "varying"):
            return f"{name} is {one.text}"
    if is_vocab and x.kind == "sharded":
        return f"weight is {weight.text} reads tokens {x.text}"
    if x.kind == "sharded" and is_sharded(x.dims[-1]):
        return "input is sharded in its features"
    if weight.kind == "sharded" and not is_vocab:
        return "weight is sharded in its features"
    return ""


def _positions_in(args: Sequence[Any]) -> Tensor | None:
    """The positions of the batch that a block is called with; blocks may take none."""
    return next((each.positions for each in args if isinstance(each, Batch)), None)


def _gradients_of(types: Sequence[Types]) -> Iterator[Types]:
    """Types of the gradients of q, k and v: keys and values that are whole serve the sharded heads
    of every rank, so their gradients are partial.
    """
    queries = types[0]
    for its_types in types:
        found = []
        for one, query in zip(its_types, queries, strict=True):
            serves_shards = one.kind == "replicated" and query.kind == "sharded"
            found.append(PARTIAL if serves_shards else one)
        yield tuple(found)


def _with_last(one: AxisType, size: int) -> AxisType:
    """The type of queries for results whose heads have another size."""
    if one.kind not in ("sharded", "replicated") or not one.dims:
        return one
    last = len(one.dims) - 1
    if is_sharded(one.dims[last]):
        return one
    return of_dims(with_dim(one.dims, last, whole_dim(size)))
