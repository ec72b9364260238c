"""Dispatch mode that types every tensor of a step, forward and backward, and reports operands that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.dimension import sequence_axes
from weft.models.common.uncompiled import uncompiled_mode
from weft.parallel.tensor.dims import DimFactor, Dims, whole_dims
from weft.parallel.tensor.propagate import arguments
from weft.planner.certificate.axis_types import (
    UNTYPED,
    ZERO,
    AxisType,
    TypeMismatchError,
    Types,
    UntypedError,
    replicated,
)
from weft.planner.certificate.rule_parts import TypedOp
from weft.planner.certificate.rules import CONSTANTS, NUMBERS, ZEROS, constant, result_types
from weft.planner.certificate.tensor_types import TensorTypes, TypedPiece
from weft.planner.measure.host_values import value_on_host
from weft.planner.measure.meta_results import MetaResults

# Note [Behind an operation without a type]
#
# What is computed from the result of an operation without a type has none either, and is not
# judged. Its backward is: autograd makes zeros of a shape and adds gradients to their entries, and
# neither names what the forward read. So once an operation has no type along an axis, what follows
# in backwards and of gradients is not judged along it; the operation itself is the finding.

NO_GRAPH_TASK = -1
"""What autograd says on a thread on which no backward runs."""
MOST_FINDINGS = 20
"""Findings that are kept of a role."""
ENTRYWISE = frozenset(
    {"_to_copy", "clone", "mul", "mul_", "add", "add_", "copy_", "div", "div_", "detach", "zero_"}
)
"""Operations that flat buffers of several types go through."""
READS = {"_local_scalar_dense": "item()", "_to_copy": "a copy to the CPU"}
"""Operations by which the host reads values, as their callers know them."""
# such an operation may do without values: `index` by numbers has the tag that it has by marks
_READS_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
COUNTS = frozenset({"arange", "linspace", "eye", "tril_indices", "triu_indices"})
"""Operations that make entries which differ: other new tensors are constants and random draws."""
VIEWS = frozenset({
    "view", "slice", "split", "split_with_sizes", "narrow", "as_strided", "alias", "detach", "_unsafe_view", "unbind",
    "select", "t", "transpose", "unsqueeze", "squeeze", "expand", "permute", "set_",
})  # fmt: skip


TypedCall = tuple[tuple[Types, ...], tuple[tuple[str, str, bool], ...]]
"""Types of a call's results; its problems: axis, what, and whether it is certain."""


@dataclass(frozen=True)
class KnownCalls:
    """Calls that were run and typed: equal ones are neither run nor typed again.

    Attributes:
        results: shapes of results; see Note [Reused results] in `planner.measure.meta_results`.
        types: of results, by the operation, and shapes and types of its operands.
    """

    results: MetaResults = field(default_factory=MetaResults)
    types: dict[Hashable, TypedCall] = field(default_factory=dict)


class ValuesNeededError(Exception):
    """An operation whose result has no shape without values: the step cannot go on."""


@dataclass(frozen=True)
class TypeFinding:
    """An operation that was not typed right.

    Attributes:
        where: block, or module inside it, e.g. `layer3.attn.o`; with "backward of" before it.
        axis: mesh axis.
        what: what is wrong.
        is_certain: whether it is a mismatch; else an operation without a rule.
    """

    where: str
    axis: str
    what: str
    is_certain: bool

    @property
    def text(self) -> str:
        """`layer3.attn.o: add of a partial tensor and a replicated one (axis tp)`."""
        prefix = "" if self.is_certain else "not typed: "
        return f"{self.where}: {prefix}{self.what} (axis {self.axis})"


@uncompiled_mode
class TypeMode(TorchDispatchMode):
    """Types every tensor; see Note [Types along an axis].

    Args:
        axes: that are typed.
        known: calls of other roles along the same axes, which are typed once.

    Attributes:
        where: the module or block that runs.
        num_operations: that were typed.
        is_paused: whether operations are not typed at the moment.
        is_declared: whether a declared backward runs: its operations are typed, and not judged.
        is_after_backward: whether all backwards of the step have run.
    """

    def __init__(self, axes: Sequence[str], known: KnownCalls | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = tuple(axes)
        self.known = known or KnownCalls()
        self.where = "the step"
        self.num_operations = 0
        self.findings: dict[tuple[str, str, str], TypeFinding] = {}
        self.tensors = TensorTypes()
        self.is_paused = False
        self.is_declared = False
        self.is_after_backward = False
        self._without_type: set[str] = set()

    def types_of(self, tensor: Tensor) -> Types:
        """The types of a tensor; of one that nothing typed made, that it is a constant."""
        known = self.tensors.find(tensor)
        if known == "mixed":
            return (UNTYPED,) * len(self.axes)
        return known or _of_constant(tensor.shape, len(self.axes))

    def type_of(self, tensor: Tensor, axis: str) -> AxisType:
        """The type of a tensor along one axis."""
        return self.types_of(tensor)[self.axes.index(axis)]

    def set(self, tensor: Tensor, types: Types) -> Tensor:
        """Declare the types of a tensor."""
        self.tensors.set(tensor, types)
        return tensor

    def report(self, axis: str, what: str, *, where: str = "", is_certain: bool = True) -> None:
        """Note a finding, once for each place; see Note [Behind an operation without a type]."""
        place = where or self.where
        if self.is_declared:
            return
        if not is_certain:
            self._without_type.update(axis.split("+"))
        elif axis in self._without_type and (self.is_after_backward or is_in_backward()):
            return
        if len(self.findings) < MOST_FINDINGS:
            finding = TypeFinding(place, axis, what, is_certain)
            self.findings.setdefault((place, axis, what), finding)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not typed: what they compute is declared."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation: runs it and notes the types of its results."""
        kwargs = kwargs or {}
        on_host = value_on_host(func, args, kwargs)
        if on_host is not None:
            self._note_read(READS[func.overloadpacket.__name__])
            return on_host
        out = self._run(func, args, kwargs)
        if self.is_paused:
            return out
        self.num_operations += 1
        call = _OperationCall(
            func, args, kwargs, _tensors(args) + _tensors(kwargs.values()), _tensors((out,))
        )
        if call.outputs:
            self._note(call)
        return out

    def _note(self, call: _OperationCall) -> None:
        """Note the types of a call's results."""
        if not call.operands:
            for tensor in call.outputs:
                self.set(tensor, self._of_new(call, tensor))
            return
        types = [self.tensors.find(tensor) for tensor in call.operands]
        if "mixed" in types and call.name not in CONSTANTS:
            self._note_mixed(call.name, call.operands, call.outputs)
            return
        note = self.tensors.write if call.func._schema.is_mutable else self.tensors.set
        for tensor, its_types in zip(call.outputs, self._results(call), strict=True):
            note(tensor, its_types)

    def _of_new(self, call: _OperationCall, tensor: Tensor) -> Types:
        """Of a tensor that is made of no other."""
        is_number = call.name in NUMBERS and not tensor.dim()
        if call.name in ZEROS or (is_number and 0 in call.args):
            return (ZERO,) * len(self.axes)
        if call.name in COUNTS:
            return _of_constant(tensor.shape, len(self.axes))
        return (constant(tuple(tensor.shape)),) * len(self.axes)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = self.known.results
        key = results.key(func, args, kwargs)
        known = results.find(key)
        if known is not None:
            return known.make()
        out = self._run_anew(func, args, kwargs)
        inputs = _tensors(args) + _tensors(kwargs.values())
        results.note(key, inputs=inputs, result=out, kernel=None)
        return out

    def _run_anew(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if _READS_VALUES.isdisjoint(func.tags):
                raise
            name = func.overloadpacket.__name__
            self._note_read(name)
            raise ValuesNeededError(name) from error

    def _note_read(self, name: str) -> None:
        """The host reads values: what the step does then is typed for ones alone."""
        if self.is_paused:
            return
        what = f"{name} reads values, and what is computed from them has no type"
        self.report("+".join(self.axes), what, is_certain=False)

    def _results(self, call: _OperationCall) -> tuple[Types, ...]:
        """The types of the results; equal calls are computed once."""
        operand_types = tuple(map(self.types_of, call.operands))
        shapes = tuple(tensor.shape for tensor in (*call.operands, *call.outputs))
        key = (call.func, shapes, operand_types, _without_tensors((call.args, call.kwargs)))
        known = self.known.types.get(key)
        if known is None:
            known = self._compute(call, operand_types)
            self.known.types[key] = known
        results, problems = known
        for axis, what, is_certain in problems:
            self.report(axis, what, is_certain=is_certain)
        return results

    def _compute(self, call: _OperationCall, operand_types: tuple[Types, ...]) -> TypedCall:
        by_axis: list[list[AxisType]] = []
        problems: list[tuple[str, str, bool]] = []
        for place, axis in enumerate(self.axes):
            try:
                along = [types[place] for types in operand_types]
                found = call.result_types(along, token_dim=0 if axis in sequence_axes() else 1)
            except (TypeMismatchError, UntypedError) as error:
                is_certain = isinstance(error, TypeMismatchError)
                problems.append((axis, str(error) if is_certain else f"aten.{error}", is_certain))
                found = [UNTYPED for _ in call.outputs]
            by_axis.append(found)
        results = tuple(zip(*by_axis, strict=True)) if by_axis else tuple(() for _ in call.outputs)
        return results, tuple(problems)

    def _note_mixed(self, name: str, operands: list[Tensor], outputs: list[Tensor]) -> None:
        """Operations on flat buffers whose entries have several types."""
        if name in VIEWS:
            return  # a view finds the types of its entries by its memory
        if name == "zero_":
            self.tensors.write(outputs[0], (ZERO,) * len(self.axes))
            return
        large = [tensor for tensor in operands if tensor.numel() > 1]
        if name in ENTRYWISE and outputs[0].is_contiguous():
            sources = operands if name == "copy_" else large  # one entry is copied, too
            self.tensors.set_pieces(outputs[0], self._merged(name, sources))
            return
        for tensor in outputs:
            self.tensors.write(tensor, (UNTYPED,) * len(self.axes))
        for axis in self.axes:
            self.report(axis, f"aten.{name} of a flat buffer", is_certain=False)

    def _merged(self, name: str, operands: list[Tensor]) -> list[TypedPiece]:
        """Pieces of the result of an entrywise operation: those of its source."""
        if name in ("copy_",):
            return self.tensors.pieces(operands[-1])
        pieces: list[TypedPiece] = []
        for operand in operands:
            pieces.extend(
                piece
                for piece in self.tensors.pieces(operand)
                if not all(each.kind == "zero" for each in piece.types)
            )
        return pieces


def is_in_backward() -> bool:
    """Whether autograd runs on this thread."""
    return torch._C._current_graph_task_id() != NO_GRAPH_TASK


@dataclass(frozen=True, slots=True)
class _OperationCall:
    """A call of an operation, with the tensors among its arguments and its results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    outputs: list[Tensor]

    @property
    def name(self) -> str:
        """The name of the operation in torch.ops.aten."""
        return str(self.func.overloadpacket.__name__)

    def result_types(self, operands: Sequence[AxisType], *, token_dim: int) -> list[AxisType]:
        """Types of the results along one axis, of those of the operands.

        Args:
            token_dim: dim of x_BSD that the axis shards where it shards tokens.

        Raises:
            TypeMismatchError: the operands do not fit together.
            UntypedError: there is no rule, or none for such arguments.
        """
        dims = tuple(_dims_of(*pair) for pair in zip(operands, self.operands, strict=True))
        named = arguments(self.func, self.args, self.kwargs)
        op = TypedOp(
            name=self.name,
            args=named,
            operands=dims,
            outputs=tuple(self.outputs),
            token_dim=token_dim,
        )
        try:
            found = result_types(self.func, op, operands)
        except (IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
            # a rule for other arguments than these: the operation has none
            raise UntypedError(f"{self.name} ({type(error).__name__} in its rule)") from error
        if len(found) != len(self.outputs):
            raise UntypedError(f"{self.name} with {len(self.outputs)} results")
        return found


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results of an operation, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


@functools.lru_cache(maxsize=1024)
def _of_constant(shape: tuple[int, ...], num_axes: int) -> Types:
    """Of a tensor that nothing typed made: every rank holds it."""
    return (replicated(tuple(shape)),) * num_axes


def _dims_of(one: AxisType, tensor: Tensor) -> Dims:
    """Dims of an operand; all entries of zeros are equal."""
    if one.kind == "zero":
        return tuple((DimFactor(size, repeated=True),) for size in tensor.shape)
    if len(one.dims) == tensor.dim():
        return one.dims
    return whole_dims(tensor.shape)


def _without_tensors(tree: Any) -> Hashable:
    """Arguments as a key."""
    if isinstance(tree, Tensor):
        return "tensor"
    if isinstance(tree, (tuple, list)):
        return tuple(map(_without_tensors, tree))
    if isinstance(tree, dict):
        return tuple((name, _without_tensors(value)) for name, value in tree.items())
    return tree if isinstance(tree, Hashable) else str(tree)
