"""State that a forward may change: all that a block's modules and the user's code that they run can reach.

Note [Reachable state]
    From a block the walk follows attributes and buffers of modules, items of containers, attributes
    of objects of users' classes; and of functions of users' files the variables that they close over,
    defaults, and the globals that their code names. So a counter in a closure, a list in another
    module, a class attribute and a generator at the top of a file are seen as attributes of a layer
    are. Code of torch, NumPy and Python is not followed. Random number generators are compared by
    their state; those that everything shares (of `random`, NumPy and torch) are part of every state.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from weft.code.reachable import Reach, Walk
from weft.parallel.model.fingerprint import fingerprint

State = dict[str, Any]
"""Name of a value -> what differs where it has changed."""
MOST_BYTES = 2**24
"""Larger tensors and arrays are compared by their version, not by their bytes."""
PLAIN = (str, int, bool, bytes, type(None))
SHARED = "generator of "
"""Start of the names of generators that everything shares."""
GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)


def state_of(block: nn.Module, name: str, packages: frozenset[str] = frozenset()) -> State:
    """The state that a forward of this block may change, by name; see Note [Reachable state].

    Args:
        packages: installed ones whose code is followed.
    """
    reach = Reach(packages)
    found: State = {}
    for path, value, first in Walk(reach.parts).visit(name, block):
        if isinstance(value, PLAIN):
            found[path] = value
        elif isinstance(value, (float, complex)):
            found[path] = repr(value)  # NaN equals itself
        elif first is not None:
            found.setdefault(path, id(value))
        else:
            found[path] = _token(value, reach)
    return found | shared_generators()


def shared_generators() -> State:
    """States of the generators that everything shares."""
    found: State = {
        f"{SHARED}random": hash(random.getstate()),
        f"{SHARED}numpy.random": _dict_hash(np.random.get_state(legacy=False)),
        f"{SHARED}torch": _bytes_hash(torch.get_rng_state()),
    }
    device = torch.get_default_device().type
    if device not in ("cpu", "meta"):
        found[f"{SHARED}torch.{device}"] = _bytes_hash(
            torch.get_device_module(device).get_rng_state()
        )
    return found


def changed_name(before: State, after: State) -> str:
    """Name of the first value that is new, has changed or is gone; empty if there is none."""
    for name, value in after.items():
        if name not in before or before[name] != value:
            return name
    return next((name for name in before if name not in after), "")


def is_generator(name: str, state: State) -> bool:
    """Whether a name is that of a random number generator."""
    return name.startswith(SHARED) or isinstance(state.get(name), _GeneratorState)


@dataclass(frozen=True)
class _GeneratorState:
    """The state of a generator object."""

    kind: str
    state: object


def _dict_hash(state: Mapping[str, Any]) -> str:
    """The hash of the state of a generator of NumPy."""
    parts = []
    for key, value in state.items():
        if isinstance(value, dict):
            parts.append(_dict_hash(value))
        elif isinstance(value, np.ndarray):
            parts.append(str(zlib.crc32(value.tobytes())))
        else:
            parts.append(f"{key}={value}")
    return " ".join(parts)


def _bytes_hash(tensor: Tensor) -> int:
    """The hash of the entries of a tensor with values."""
    with no_dispatch():  # a mode of fake tensors would take the values away
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        return zlib.crc32(flat.numpy().data)


def _generator_state(generator: Any) -> _GeneratorState:
    kind = type(generator).__name__
    if isinstance(generator, torch.Generator):
        return _GeneratorState(kind, _bytes_hash(generator.get_state()))
    if isinstance(generator, random.SystemRandom):
        return _GeneratorState(kind, None)
    if isinstance(generator, random.Random):
        return _GeneratorState(kind, hash(generator.getstate()))
    if isinstance(generator, np.random.RandomState):
        return _GeneratorState(kind, _dict_hash(generator.get_state(legacy=False)))
    bits = getattr(generator, "bit_generator", generator)
    return _GeneratorState(kind, _dict_hash(bits.state))


def _token(value: Any, reach: Reach) -> Any:
    """What differs where a value has changed, apart from its parts."""
    if isinstance(value, Tensor):
        return _tensor_token(value)
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= MOST_BYTES and not value.dtype.hasobject
        return id(value), zlib.crc32(np.asarray(value).tobytes()) if is_small else None
    if isinstance(value, GENERATORS):
        return _generator_state(value)
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return id(value) if isinstance(value, (dict, list, set)) else 0, len(value)
    if isinstance(value, GeneratorType):
        return id(value), value.gi_frame.f_lasti if value.gi_frame else None
    if reach.follows(value) or isinstance(value, (ModuleType, FunctionType, type, logging.Logger)):
        return id(value)
    return fingerprint(value) or id(value)


def _tensor_token(tensor: Tensor) -> Any:
    """Writes through `.data` or NumPy change no version."""
    is_small = tensor.numel() * tensor.element_size() <= MOST_BYTES
    has_values = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if type(tensor) not in (Tensor, nn.Parameter):
        has_values = False
    number = _bytes_hash(tensor) if has_values and is_small else None
    return id(tensor), tensor._version, number
