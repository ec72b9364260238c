"""Results and kernels of operations on the meta device, computed once for equal arguments.

Note [Reused results]
    On the meta device an operation computes shapes alone, with code in Python that takes longer
    than everything else of a recorded step. A step repeats the same operations in each layer and
    micro-batch. So the shapes, strides and types of new tensors are kept by those of the arguments,
    and equal calls get empty tensors of that form. Operations that change an argument, or whose
    result shares memory with one, are run every time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.planner.measure.kernels import KernelLaunch

META = torch.device("meta")
PLAIN_TENSORS = (Tensor, nn.Parameter)


class TensorForm(NamedTuple):
    """What decides an operation's result of a tensor on the meta device.

    Attributes:
        same_as: place of the same tensor among those of the call, from 0.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    same_as: int = 0

    @staticmethod
    def of(tensor: Tensor, same_as: int = 0) -> TensorForm:
        """The form of a tensor."""
        return TensorForm(tensor.shape, tensor.stride(), tensor.dtype, same_as)

    def make(self) -> Tensor:
        """A new tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


@dataclass(frozen=True)
class KnownResult:
    """The result of an operation.

    Attributes:
        container: type of the result: Tensor, tuple or list.
        forms: of its tensors; None for a result that is None.
        kernel: that is launched; None for an operation without one.
    """

    container: type
    forms: tuple[TensorForm | None, ...]
    kernel: KernelLaunch | None

    def make(self) -> Any:
        """The result, of new tensors."""
        made = [None if form is None else form.make() for form in self.forms]
        if self.container is Tensor:
            return made[0]
        return self.container(made)


class NotReusableError(Exception):
    """A call whose result does not follow from the forms of its arguments."""


class MetaResults:
    """Results of the calls of a recording; see Note [Reused results]."""

    def __init__(self) -> None:
        self._known: dict[Hashable, KnownResult] = {}
        self._is_functional: dict[Any, bool] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """What a call's result depends on; None for a call that must be run."""
        is_functional = self._is_functional.get(func)
        if is_functional is None:
            is_functional = _is_functional(func)
            self._is_functional[func] = is_functional
        if not is_functional:
            return None
        tensors: dict[int, int] = {}
        try:
            return func, _form(args, tensors), _form(kwargs, tensors)
        except NotReusableError:
            return None

    def find(self, key: Hashable | None) -> KnownResult | None:
        """The result of an equal call, if there was one."""
        return None if key is None else self._known.get(key)

    def note(
        self,
        key: Hashable | None,
        *,
        inputs: Sequence[Tensor],
        result: Any,
        kernel: KernelLaunch | None,
    ) -> None:
        """Keep the result of a call, if it is made of new tensors."""
        if key is None:
            return
        container = type(result)
        if container not in (Tensor, tuple, list):
            return
        tensors = [result] if container is Tensor else result
        forms = _new_forms(tensors, inputs)
        if forms is not None:
            self._known[key] = KnownResult(container, forms, kernel)


def _new_forms(
    tensors: Sequence[Any], inputs: Sequence[Tensor]
) -> tuple[TensorForm | None, ...] | None:
    """The forms of a result's tensors; None if one of them is not new."""
    used = {_storage_id(tensor) for tensor in inputs}
    forms: list[TensorForm | None] = []
    for tensor in tensors:
        if tensor is None:
            forms.append(None)
            continue
        if type(tensor) is not Tensor or not _has_own_storage(tensor, used):
            return None
        used.add(_storage_id(tensor))
        forms.append(TensorForm.of(tensor))
    return tuple(forms)


def _storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _is_functional(func: Any) -> bool:
    """Whether an operation's schema says that it changes nothing and returns no view."""
    schema = func._schema
    has_alias = any(each.alias_info is not None for each in schema.returns)
    return not schema.is_mutable and not has_alias


def _has_own_storage(tensor: Tensor, used: set[int]) -> bool:
    """Whether a tensor on the meta device fills a storage that is not among those used."""
    if not tensor.is_meta or _storage_id(tensor) in used or tensor.storage_offset():
        return False
    num_entries = 0
    if tensor.numel():
        num_entries = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            num_entries += (size - 1) * stride
    num_bytes = num_entries * tensor.element_size()
    return tensor.untyped_storage().nbytes() == num_bytes


def _form(value: Any, tensors: dict[int, int]) -> Hashable:
    """What an argument does to a result.

    Args:
        tensors: identity of each tensor of the call so far -> its place.

    Raises:
        NotReusableError: a tensor that is not a plain one on the meta device.
    """
    if isinstance(value, Tensor):
        return _tensor_form(value, tensors)
    if isinstance(value, tuple | list):
        return tuple([_form(item, tensors) for item in value])
    if isinstance(value, dict):
        items = []
        for name, item in value.items():
            items.append((name, _form(item, tensors)))
        return tuple(items)
    return type(value), value  # 1, 1.0 and True are equal


def _tensor_form(tensor: Tensor, tensors: dict[int, int]) -> TensorForm:
    is_plain = type(tensor) in PLAIN_TENSORS and not tensor.is_complex()
    if not is_plain or not tensor.is_meta:
        raise NotReusableError
    place = tensors.setdefault(id(tensor), len(tensors))
    return TensorForm.of(tensor, same_as=place)
