"""Owns how values, and above all functions, get from a test or a script into another process and back."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

# Note [Carrying functions]
# pickle names a function by its module. That fails for lambdas, for functions inside a test, and for modules that cannot
# be imported by name: those that pytest loads in importlib mode, or a script, which is `__main__`. So what is installed
# (weft, torch, the standard library) goes by name, and functions of everything else go by value: byte code, defaults,
# what they close over and the globals they read. A test module is then not even loaded in the other process; only where
# one of its classes is needed it is, from its file, so that `if __name__ == "__main__"` does not run.
# Both ends are the same Python, so byte code is safe to send.

_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def pack(value: object) -> bytes:
    """`value` as bytes, for `unpack` in another process of the same program; see Note [Carrying functions]."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` packed."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            return _module, (obj.__name__, getattr(obj, "__file__", None))
        if isinstance(obj, FunctionType) and not _is_installed(obj.__module__):
            made_from = (marshal.dumps(obj.__code__), obj.__module__, len(obj.__closure__ or ()))
            return _function, made_from, _state(obj), None, None, _set_state
        if isinstance(obj, type) and not _is_installed(obj.__module__):
            return _attribute, (obj.__module__, _file(obj.__module__), obj.__qualname__)
        return NotImplemented


def _is_installed(name: str) -> bool:
    file = _file(name)
    if name.partition(".")[0] in ("weft", "builtins") or (file is None and name != "__main__"):
        return True
    return file is not None and any(folder in Path(file).parents for folder in _INSTALLED)


def _file(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _state(function: FunctionType) -> dict[str, Any]:
    names = {name for name in _global_names(function.__code__) if name in function.__globals__}
    return {
        "name": function.__qualname__,
        "defaults": (function.__defaults__, function.__kwdefaults__),
        "globals": {name: function.__globals__[name] for name in names},
        "cells": [_content(cell) for cell in function.__closure__ or ()],
    }


def _global_names(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name that is not bound yet
        return ()


def _function(code: bytes, module: str, num_cells: int) -> FunctionType:
    """The bare function; what it refers to comes with `_set_state`, since that may be the function itself."""
    cells = tuple(CellType() for _ in range(num_cells))
    return FunctionType(marshal.loads(code), {"__name__": module, "__builtins__": __builtins__}, closure=cells)


def _set_state(function: FunctionType, state: dict[str, Any]) -> None:
    function.__qualname__ = state["name"]
    function.__defaults__, function.__kwdefaults__ = state["defaults"]
    function.__globals__.update(state["globals"])
    for cell, content in zip(function.__closure__ or (), state["cells"], strict=True):
        if content:
            cell.cell_contents = content[0]


def _attribute(module: str, file: str | None, qualname: str) -> Any:
    found: Any = _module(module, file)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _module(name: str, file: str | None) -> ModuleType:
    if name == "__main__" and _file("__main__") != file:
        name = "weft_main"
    if name == "weft_main" and _file("__main__") == file:
        name = "__main__"
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        return _load(name, file)


def _load(name: str, file: str | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name!r} has no file to load it from")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
