"""What a value consists of: parts of modules, containers, functions and objects of users' classes, by name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from torch import nn

from weft.parallel.model.executed_code import is_users_file

TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of every module that name its parts."""
MOST_ITEMS = 2**12
"""Longer containers are compared by their length and identity."""
Parts = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Reach:
    """Which parts of a value are followed; see Note [Reachable state].

    Args:
        packages: installed ones whose code is followed.
    """

    packages: frozenset[str]

    def follows(self, value: Any) -> bool:
        """Whether parts of an object are followed, which then has no value of its own."""
        if isinstance(value, (nn.Module, MethodType, functools.partial)):
            return True
        return self._is_users_class(type(value)) or hasattr(value, "__wrapped__")

    def _is_users_class(self, kind: type) -> bool:
        name = kind.__module__
        module = sys.modules.get(name)
        return name == "__main__" if module is None else self._is_users_module(module)

    def _is_users_module(self, module: ModuleType) -> bool:
        """Whether a module is a user's file, or a notebook."""
        file = getattr(module, "__file__", None)
        if file is None:
            return module.__name__ == "__main__"
        return is_users_file(file, self.packages)

    def parts(self, path: str, value: Any) -> Parts:
        """What a value consists of, by name."""
        if isinstance(value, nn.Module):
            yield from _parts_of_module(path, value)
        elif isinstance(value, FunctionType):
            if is_users_file(value.__code__.co_filename, self.packages):
                yield from _parts_of_function(value)
        elif isinstance(value, MethodType):
            yield path, value.__self__
            yield path, value.__func__
        elif isinstance(value, functools.partial):
            yield f"{path}.func", value.func
            yield f"{path}.args", (value.args, value.keywords)
        elif isinstance(value, ModuleType):
            if self._is_users_module(value):
                yield from _attributes(value.__name__.rpartition(".")[2], value)
        elif isinstance(value, type):
            if self._is_users_class(value):
                yield from _attributes(value.__qualname__, value)
                yield from ((base.__qualname__, base) for base in value.__bases__)
        elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
            yield from _items(path, value)
        elif isinstance(value, GeneratorType):
            if value.gi_frame is not None:
                yield f"{path} locals", dict(value.gi_frame.f_locals)
        elif hasattr(value, "__wrapped__"):
            yield path, value.__wrapped__
        elif self._is_users_class(type(value)):
            yield type(value).__qualname__, type(value)
            yield from _attributes(path, value)


def _items(path: str, value: Any) -> Parts:
    if len(value) > MOST_ITEMS:
        return
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    else:
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(value))


def _attributes(path: str, value: Any) -> Parts:
    for name, item in list(getattr(value, "__dict__", {}).items()):
        if not name.startswith("__"):
            yield f"{path}.{name}", item
    slots = getattr(type(value), "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if hasattr(value, name):
            yield f"{path}.{name}", getattr(value, name)


def _parts_of_module(path: str, module: nn.Module) -> Parts:
    """Attributes, buffers and parameters, submodules, and the class where it is a user's."""
    yield type(module).__qualname__, type(module)
    for name, value in list(vars(module).items()):
        if name not in TABLES and not name.endswith("_hooks"):
            yield f"{path}.{name}", value
    for table in TABLES:
        for name, value in list(vars(module)[table].items()):
            yield f"{path}.{name}", value
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        yield from ((f"{path} hook", hook) for hook in list(hooks.values()))


def _parts_of_function(function: FunctionType) -> Parts:
    """Of a function of a user's file: what it closes over, defaults, attributes, and globals that
    its code names.
    """
    code = function.__code__
    title = f"{Path(code.co_filename).stem}.{function.__qualname__}"
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{title}: {name}", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield f"{title}: defaults", (function.__defaults__, function.__kwdefaults__)
    yield from _attributes(title, function)
    for name in sorted(_names_in(code)):
        if name in function.__globals__:
            yield f"{Path(code.co_filename).stem}.{name}", function.__globals__[name]


def _names_in(code: CodeType) -> set[str]:
    """Names that code and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
