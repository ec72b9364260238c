"""Values of objects whose class is not a user's: numbers, arrays, tensors, generators, what pickle would write. No torch."""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CodeType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

from weft.code.bytecode import code_text
from weft.errors import type_and_message

DIGITS = 16
DESCRIPTORS = (
    *(GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType),
    *(WrapperDescriptorType, MethodWrapperType),
)
WITHOUT_VALUE = (type(threading.Lock()), type(threading.RLock()), type(os.environ))
"""Locks change no number; lookups in the environment are recorded, see `weft.code.reads`."""


class NoValueError(Exception):
    """An object has no value that is equal in another process."""


@dataclass(frozen=True)
class HashedValue:
    """What is hashed of an object.

    Attributes:
        text: its own value, equal in every process.
        parts: further values that it consists of.
    """

    text: str
    parts: tuple[tuple[str, Any], ...] = ()


def short_digest(content: bytes | memoryview) -> str:
    """The first `DIGITS` hexadecimal digits of the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def kind_of(value: Any) -> str:
    """The name of a value's class."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def value_of(value: Any) -> HashedValue:
    """The value of an object that has no parts of its own.

    Raises:
        NoValueError: it has none that is equal in another process.
    """
    kind = kind_of(value)
    if isinstance(value, WITHOUT_VALUE):
        return HashedValue(kind)
    if isinstance(value, DESCRIPTORS):
        return HashedValue(f"{kind} {getattr(value, '__qualname__', value.__name__)}")
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        is_global = owner is None or hasattr(owner, "__spec__")
        name = f"{kind} {value.__module__}.{value.__qualname__}"
        return HashedValue(name, () if is_global else (("self", owner),))
    if isinstance(value, CodeType):
        return HashedValue(code_text(value))
    if isinstance(value, GeneratorType):
        return _generator_value(value)
    if isinstance(value, weakref.ref):
        return HashedValue(kind, (("referent", value()),))
    if isinstance(value, threading.local):
        return HashedValue(kind, (("values", dict(vars(value))),))
    if isinstance(value, io.IOBase) and not value.closed and value.writable():
        return HashedValue(kind)
    return _array_value(value) or _tensor_value(value) or _pickled(value)


def _generator_value(value: GeneratorType[Any, Any, Any]) -> HashedValue:
    """Where a generator is, and its variables."""
    frame = value.gi_frame
    if frame is None:
        return HashedValue(f"{kind_of(value)} at its end")
    text = f"{kind_of(value)} {code_text(value.gi_code)} at {frame.f_lasti}"
    return HashedValue(text, (("variables", dict(frame.f_locals)),))


def _array_value(value: Any) -> HashedValue | None:
    """The hash of an array of NumPy; None for any other value."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    text = f"{kind_of(value)} {value.dtype.str} {value.shape}"
    if value.dtype.hasobject:
        return HashedValue(text, (("entries", value.tolist()),))
    if value.dtype.fields:
        text = f"{text} {value.dtype.descr}"
    return HashedValue(f"{text} {short_digest(value.tobytes())}")


def _tensor_value(value: Any) -> HashedValue | None:
    """Of a tensor with values, or on the meta device; the state of a generator.

    A parameter that is trained is its type and shape: its values are the state of a run, not code.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return None
    if isinstance(value, torch.Generator):
        return HashedValue(kind_of(value), (("state", value.get_state()),))
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_nested or value.layout is not torch.strided:
        raise NoValueError(f"a tensor of the class {kind_of(value)}, {value.layout}")
    is_trained = isinstance(value, torch.nn.Parameter) and value.requires_grad
    text = f"{kind_of(value)} {value.dtype} {tuple(value.shape)} {value.requires_grad}"
    if is_trained or value.is_meta:
        return HashedValue(text)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise NoValueError(f"a tensor of the class {kind_of(value)}")
    flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return HashedValue(f"{text} {short_digest(flat.numpy().data)}")


def _pickled(value: Any) -> HashedValue:
    """What pickle would write of an object, as values that are hashed like all others."""
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        with warnings.catch_warnings():
            # Iterators of itertools warn from Python 3.12 on that they will refuse in 3.14.
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return HashedValue(f"{kind_of(value)} {reduced}")
        function, arguments, *rest = reduced
        items = [list(each or ()) for each in rest[1:3]]
    except Exception as error:  # noqa: BLE001 - any object may refuse to be pickled, in its own way
        raise NoValueError(f"{kind_of(value)}: {type_and_message(error)}") from None
    parts = (("made by", function), ("arguments", arguments), ("state", rest[:1] + items))
    return HashedValue(kind_of(value), parts)
