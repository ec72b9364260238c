"""Fingerprints of modules: equal only for modules that no forward can tell apart; and copies made from them.

Note [Fingerprints]
    A fingerprint is what pickle writes of a module: all that `copy.deepcopy` copies (types,
    attributes, hooks, which objects are one object), in the same order. Three kinds of objects are
    not written, but numbered in order of their first occurrence and compared aside:

        tensors                by what the caller describes them with; their values are not read
        functions, classes     by identity, as are members of enums
        the given `opaque`     by identity

    A module that holds an object with a `__deepcopy__` of its own, a bound method, a function that
    closes over modules, or an object that cannot be pickled, has no fingerprint. State outside the
    module is not seen: globals, class attributes, other closures.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - of objects of this process, for this process
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.model.module_copy import closes_over_modules

META = torch.device("meta")

_VALUE_TYPES = frozenset({str, int, float, bool, type(None), dict, tuple, list})
_IDENTITY_TYPES = (FunctionType, type, Enum)


@dataclass(frozen=True)
class Fingerprint:
    """What two objects must have in common to compute the same; see Note [Fingerprints].

    Attributes:
        structure: as pickle writes it.
        tensors: descriptions, in order of first occurrence.
        identities: functions, classes, members of enums and opaque objects, in order of first
            occurrence.
    """

    structure: bytes
    tensors: tuple[Hashable, ...]
    identities: tuple[Hashable, ...]

    def copy(self, tensors: Sequence[Tensor]) -> Any:
        """A deep copy of the object, with these tensors in place of its own."""
        reader = _Reader(io.BytesIO(self.structure), tensors, self.identities)
        return reader.load()


@dataclass(frozen=True)
class TensorSpec:
    """All that a forward may know of a tensor on the meta device."""

    is_parameter: bool
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a dense tensor.

        Raises:
            TypeError: it is of another class than `Tensor` and `Parameter`.
        """
        kind = type(tensor)
        if kind not in (Tensor, nn.Parameter):
            raise TypeError(f"{kind.__name__} is a subclass of Tensor")
        return cls(
            is_parameter=kind is nn.Parameter,
            dtype=tensor.dtype,
            device=tensor.device,
            shape=tensor.shape,
            stride=tensor.stride(),
            requires_grad=tensor.requires_grad,
        )

    def on_meta(self) -> Tensor:
        """A tensor of this spec on the meta device."""
        data = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
        if not self.is_parameter:
            return data
        return nn.Parameter(data, requires_grad=self.requires_grad)


def fingerprint(
    obj: Any,
    describe: Callable[[Tensor], Hashable] = TensorSpec.of,
    *,
    opaque: tuple[Hashable, ...] = (),
) -> Fingerprint | None:
    """The fingerprint of a module, or of a tree of them; None where nothing can be said.

    Args:
        describe: what a forward may know of a tensor.
        opaque: objects that are compared by identity.
    """
    stream = io.BytesIO()
    writer = _Writer(stream, describe, opaque)
    try:
        writer.dump(obj)
    except Exception:  # noqa: BLE001 - any object may refuse to be pickled, in its own way
        return None
    return Fingerprint(stream.getvalue(), tuple(writer.tensors), tuple(writer.identities))


class _Writer(pickle.Pickler):
    """Writes structure; keeps what is compared aside."""

    def __init__(
        self,
        stream: io.BytesIO,
        describe: Callable[[Tensor], Hashable],
        opaque: tuple[Hashable, ...],
    ) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Hashable] = []
        self.identities: list[Hashable] = []
        self._describe = describe
        self._opaque_ids = frozenset(map(id, opaque))
        self._numbers: dict[int, tuple[str, int]] = {}
        self._kept: list[Any] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        """The number of an object that is compared aside; called by pickle for every object."""
        kind = type(obj)
        if kind in _VALUE_TYPES:
            return None
        key = id(obj)
        if key in self._numbers:
            return self._numbers[key]
        if issubclass(kind, Tensor):
            place = len(self.tensors)
            self.tensors.append(self._describe(obj))
            return self._number(obj, "tensor", place)
        if closes_over_modules(obj):
            raise pickle.PicklingError("a function that closes over modules belongs to one module")
        if issubclass(kind, _IDENTITY_TYPES) or key in self._opaque_ids:
            place = len(self.identities)
            self.identities.append(obj)
            return self._number(obj, "identity", place)
        if kind is MethodType or hasattr(kind, "__deepcopy__"):
            raise pickle.PicklingError(f"{kind.__name__} cannot be compared")
        return None

    def _number(self, obj: Any, kind: str, place: int) -> tuple[str, int]:
        self._kept.append(obj)  # so that its id stays its own
        number = (kind, place)
        self._numbers[id(obj)] = number
        return number


class _Reader(pickle.Unpickler):
    """Reads what a `_Writer` wrote."""

    def __init__(
        self, stream: io.BytesIO, tensors: Sequence[Tensor], identities: Sequence[Hashable]
    ) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._identities = identities

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        """The object of a number."""
        kind, place = pid
        if kind == "tensor":
            return self._tensors[place]
        return self._identities[place]
