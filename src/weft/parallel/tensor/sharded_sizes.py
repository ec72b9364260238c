"""Sizes of sharded dims in the sharding trace: numbers that may give shapes, but not values.

A rank sees `weight.shape[0]` of its shard. As a shape that is right; as a number (a scale, a mean's
divisor) it differs from that of one device. While a block is traced, sizes along sharded dims are
`ShardedSize`, whose arithmetic yields `ShardedSize` or `ShardedNumber`; an operation that computes
values with one is rejected, and so are functions of `math` that call `float()` of one. Not
followed are control flow, `int()`, `math.log`, and a float on the left (`1.0 / size`), which Python
computes without asking the size: such a block is stopped by the proof before the first step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.parallel.tensor.dims import ShardingError, is_sharded
from weft.parallel.tensor.sharding_mode import ShardingTrace

FIX = "take numbers from the config, and from tensors sizes for shapes alone"
ARITHMETIC = frozenset({
    "add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "multiply", "rmul", "imul", "div", "divide", "true_divide",
    "truediv", "rdiv", "rtruediv", "itruediv", "floordiv", "floor_divide", "rfloordiv", "pow", "rpow", "remainder", "lerp",
    "addcmul", "addcdiv", "clamp", "maximum", "minimum", "fill", "full", "full_like", "tensor", "scalar_tensor", "as_tensor",
})  # fmt: skip
"""Functions that compute values with the numbers they are given, without underscores around."""
SIZES = frozenset({"size", "out", "dim"})
"""Keyword arguments of such functions that are shapes or places."""


class ShardedSize(int):
    """A local size along a sharded dim, or a whole number computed from one."""

    def __float__(self) -> float:
        raise _used_as_number("float() or math")


class ShardedNumber(float):
    """A fraction computed from the size of a sharded dim."""


Number = int | float
UNARY: Mapping[str, Callable[..., Number]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
}
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def _plain(value: Number) -> Number:
    """The number without its mark."""
    if isinstance(value, int):
        return int.__add__(value, 0)
    return float.__add__(value, 0.0)


def _marked(value: Number) -> ShardedSize | ShardedNumber:
    if isinstance(value, int):
        return ShardedSize(value)
    return ShardedNumber(value)


def _unary(name: str) -> Callable[..., Any]:
    compute: Callable[..., Number] = UNARY[name]

    def method(self: Number, *digits: int) -> Number:
        result = compute(_plain(self), *digits)
        return _marked(result)

    return method


def _binary(name: str, *, reflected: bool) -> Callable[..., Any]:
    compute = getattr(operator, name)

    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        operands = [_plain(self), _plain(other)]
        if reflected:
            operands.reverse()
        return _marked(compute(*operands))

    return method


def _add_arithmetic(kind: type) -> None:
    """Give a kind of number operators whose results are marked."""
    for name in UNARY:
        setattr(kind, f"__{name}__", _unary(name))
    for name in BINARY:
        setattr(kind, f"__{name}__", _binary(name, reflected=False))
        setattr(kind, f"__r{name}__", _binary(name, reflected=True))


_add_arithmetic(ShardedSize)
_add_arithmetic(ShardedNumber)


class SizesOfShards(TorchFunctionMode):
    """While it is active sizes of sharded dims are marked, and operations that compute values with
    them are rejected.
    """

    def __init__(self, trace: ShardingTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every function of tensors.

        Raises:
            ShardingError: it computes values with the size of a sharded dim.
        """
        kwargs = kwargs or {}
        if func in SIZE_READERS:
            tensor, *place = args
            return self._size(tensor, SIZE_READERS[func], *place, **kwargs)
        name = func.__name__.strip("_")
        numbers = list(_numbers_of(name, args, kwargs))
        if any(isinstance(number, (ShardedSize, ShardedNumber)) for number in numbers):
            raise _used_as_number(name)
        return func(*args, **kwargs)

    def _size(
        self, tensor: Tensor, read: Callable[[list[int]], Any], dim: int | None = None
    ) -> Any:
        """The shape, one of its sizes, or what `read` computes of them."""
        sizes = list(map(int, tensor.shape))
        if tensor in self.trace:
            for place, its_dim in enumerate(self.trace.value(tensor).dims):
                if is_sharded(its_dim):
                    sizes[place] = ShardedSize(sizes[place])
        if dim is not None:
            return sizes[dim]
        return read(sizes)


def _numel(sizes: list[int]) -> int:
    return math.prod(sizes)


SIZE_READERS: Mapping[Any, Callable[[list[int]], Any]] = {
    torch.Tensor.shape.__get__: torch.Size,  # type: ignore[attr-defined]
    torch.Tensor.size: torch.Size,
    torch.Tensor.numel: _numel,
    torch.Tensor.nelement: _numel,
    torch.numel: _numel,
}


def _numbers_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Arguments that a function computes values with."""
    if name not in ARITHMETIC:
        return [kwargs.get("scale"), kwargs.get("alpha")]
    positional = args[1:] if name == "full" else args  # its first one is a shape
    named = [value for key, value in kwargs.items() if key not in SIZES]
    return [*positional, *named]


def _used_as_number(operation: str) -> ShardingError:
    return ShardingError(f"{operation} computes with the local size of a sharded dim", fix=FIX)
