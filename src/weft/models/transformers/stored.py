"""Tensors of the folders that transformers writes, and the entries of its parameters that each holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.config.hf.architectures import KEY
from weft.config.hf.mapping import TensorPart
from weft.core.axes import Box
from weft.errors import Fault, PlanError, type_and_message

Shape = tuple[int, ...]
VIEWS = frozenset({"MergeModulelist", "Concatenate"})
"""Operations of transformers' conversion whose reverse makes views."""
MOST_MOVED = 2**28
"""Entries of a model for which others are run."""


class WithoutCopies(TorchFunctionMode):
    """Tensors are left as they lie: the parts of a view are views, and take no memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, but for copies of the same entries."""
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def stored_tensors(
    lm: nn.Module, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, str, TensorPart | None]]:
    """Name of each tensor of a folder, a parameter, and the part of it that the tensor holds.

    In memory transformers has experts as one tensor, and names of its own; the files of most models
    have one tensor an expert, and those of their authors. What `save_pretrained` would write is
    found by its own conversion, of coordinates in place of values: they are views without memory.

    Args:
        lm: a model of transformers, of any device.
        shapes: of the parameters, by the names that they have in memory.

    Raises:
        PlanError: transformers has no conversion for a parameter, or it moves entries one by one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    conversions = get_model_conversion_mapping(lm, add_legacy=False)  # type: ignore[arg-type]
    moves = {type(op).__name__ for each in conversions for op in getattr(each, "operations", ())}
    num_entries = sum(map(math.prod, shapes.values()))
    if moves - VIEWS and num_entries > MOST_MOVED:
        what = f"a folder of this size cannot be read: {', '.join(sorted(moves - VIEWS))}"
        fix = "read it with transformers, and save it with save_original_format=False"
        raise PlanError(Fault(KEY, what, got=f"{num_entries} entries", fix=fix))

    def converted(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            with WithoutCopies():
                found: dict[str, Tensor] = revert_weight_conversion(lm, dict(values))  # type: ignore[arg-type]
        except Exception as error:
            what = f"transformers cannot name the tensors of a folder: {type_and_message(error)}"
            raise PlanError(Fault(KEY, what, fix="another architecture")) from error
        return found

    names = list(shapes)
    owners = converted({name: _expanded(i, shapes[name]) for i, name in enumerate(names)})
    most_dims = max(map(len, shapes.values()))
    places = [
        converted({name: _coordinates(shape, dim) for name, shape in shapes.items()})
        for dim in range(most_dims)
    ]
    for tensor, owner in owners.items():
        for region in _regions(owner):
            corner = owner[region.slices]
            param = names[int(corner[(0,) * corner.ndim])]
            shape = shapes[param]
            if tuple(owner.shape) == shape and region == Box.whole(shape):
                yield tensor, param, None
                continue
            at = box_in_order([places[dim][tensor][region.slices] for dim in range(len(shape))])
            if at is None:
                what = f"a folder has the entries of {param} in another order"
                raise PlanError(Fault(KEY, what, got=tensor, fix="another architecture"))
            yield tensor, param, TensorPart(at, region, tuple(owner.shape))


def _expanded(value: int, shape: Shape) -> Tensor:
    return torch.tensor(value, dtype=torch.int32).expand(shape)


def _coordinates(shape: Shape, dim: int) -> Tensor:
    """The index along a dim of each entry, a view; 0 where there is no such dim."""
    if dim >= len(shape):
        return _expanded(0, shape)
    index = torch.arange(shape[dim], dtype=torch.int32)
    return index.view([-1 if each == dim else 1 for each in range(len(shape))]).expand(shape)


def _regions(owner: Tensor) -> Iterator[Box]:
    """Parts of a tensor, one after the other along its first dim, that one parameter holds each."""
    rest = tuple(owner.shape[1:])
    if not owner.ndim:
        yield Box((), ())
        return
    along = owner
    while along.ndim > 1:
        along = along.select(-1, 0)
    _, lengths = torch.unique_consecutive(along, return_counts=True)
    start = 0
    for length in lengths.tolist():
        yield Box((start, *(0 for _ in rest)), (start + length, *rest))
        start += length


def box_in_order(places: Sequence[Tensor]) -> Box | None:
    """The entries of a parameter that a tensor has; None if they are no box in its order.

    Args:
        places: of each dim of the parameter, the coordinates of the tensor's entries.
    """
    missing = len(places) - places[0].ndim
    shape = (1,) * missing + tuple(places[0].shape)
    lo = tuple(int(place[(0,) * place.ndim]) for place in places)
    for dim, place in enumerate(places):
        expected = lo[dim] + torch.arange(shape[dim])
        for corner in (0, -1):
            others: list[int | slice] = [corner] * place.ndim
            if dim >= missing:
                others[dim - missing] = slice(None)
            if missing < 0 or not bool((place[tuple(others)] == expected).all()):
                return None
    return Box(lo, tuple(start + length for start, length in zip(lo, shape, strict=True)))
