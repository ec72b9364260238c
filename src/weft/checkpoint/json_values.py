"""Values of scripts as JSON and back: numbers, texts, lists, dicts, tuples, counters and small tensors, bit by bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.write_item import dtype_name
from weft.errors import CheckpointError, Fault

MAX_TENSOR_ENTRIES = 2**16
"""Larger tensors belong into the data files, as buffers of a module."""
KIND = "weft.kind"
"""Key of an object that stands for a value that JSON does not have."""


def to_json(value: Any, *, where: str) -> Any:
    """The value as JSON. States of generators, of learning-rate schedulers and of loss scalers are stored
    exactly; dicts may have numbers as keys.

    Args:
        where: name of the value, for errors.

    Raises:
        CheckpointError: a part of it is of another type.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
    if isinstance(value, Tensor) and value.numel() <= MAX_TENSOR_ENTRIES:
        entries = to_json(value.detach().cpu().tolist(), where=where)
        return {KIND: "tensor", "dtype": dtype_name(value.dtype), "value": entries}
    if isinstance(value, (list, tuple)):
        items = [to_json(each, where=f"{where}[{index}]") for index, each in enumerate(value)]
        return items if isinstance(value, list) else {KIND: "tuple", "value": items}
    if isinstance(value, Mapping):
        return _mapping_to_json(value, where=where)
    fault = Fault(
        where,
        "cannot be stored in a checkpoint",
        got=type(value).__name__,
        need="numbers, texts, lists, dicts, or a small tensor",
        fix="leave it out, or store what it is made from",
    )
    raise CheckpointError(fault)


def _mapping_to_json(value: Mapping[Any, Any], *, where: str) -> Any:
    is_plain = KIND not in value and all(isinstance(key, str) for key in value)
    if is_plain and not isinstance(value, Counter):
        return {key: to_json(each, where=f"{where}.{key}") for key, each in value.items()}
    kind = "counter" if isinstance(value, Counter) else "dict"
    pairs = [
        [to_json(key, where=where), to_json(each, where=f"{where}.{key}")]
        for key, each in value.items()
    ]
    return {KIND: kind, "value": pairs}


def from_json(stored: Any) -> Any:
    """The value that `to_json` was given."""
    if isinstance(stored, list):
        return [from_json(each) for each in stored]
    if not isinstance(stored, dict):
        return stored
    kind = stored.get(KIND)
    if kind is None:
        return {key: from_json(each) for key, each in stored.items()}
    value = from_json(stored["value"])
    if kind == "float":
        return float(value)
    if kind == "tensor":
        return torch.tensor(value, dtype=getattr(torch, stored["dtype"]))
    if kind == "tuple":
        return tuple(value)
    return Counter(dict(value)) if kind == "counter" else dict(value)
