"""What a value consists of: parts of modules, containers, functions and objects of users' classes, by name. No torch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import (
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from weft.code.users_files import is_users_file

TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of every module that name its parts."""
MOST_ITEMS = 2**12
"""Longer containers are compared by their length and identity."""
MAIN = "__main__"
PLAIN = (str, int, float, complex, bool, bytes, type(None))
WITHOUT_MODULE = (None, "builtins")
"""Modules of functions that `exec` has made without a `__name__`."""
HEAP_TYPE = 1 << 9
"""Flag of classes that Python code has made (Py_TPFLAGS_HEAPTYPE)."""
CONTAINERS = (Mapping, list, tuple, set, frozenset)
Parts = Iterator[tuple[str, Any]]


class Visit(NamedTuple):
    """A value of a walk.

    Attributes:
        path: its name.
        value: itself.
        first: name under which the same object was visited before; None: it was not.
    """

    path: str
    value: Any
    first: str | None


@dataclass
class Walk:
    """Visits values and all that they reach, each object's parts once, in a fixed order.

    Args:
        parts: what a value consists of, by name.
    """

    parts: Callable[[str, Any], Parts]
    _seen: dict[int, tuple[str, Any]] = field(
        default_factory=dict
    )  # keeps objects: ids stay theirs

    def visit(self, path: str, value: Any) -> Iterator[Visit]:
        """Visit a value, and all that it reaches."""
        left = [(path, value)]
        while left:
            name, one = left.pop()
            if isinstance(one, PLAIN):
                yield Visit(name, one, None)
            elif id(one) in self._seen:
                yield Visit(name, one, self._seen[id(one)][0])
            else:
                self._seen[id(one)] = (name, one)
                yield Visit(name, one, None)
                left += reversed(list(self.parts(name, one)))


@dataclass(frozen=True)
class Reach:
    """Which parts of a value are followed; see Note [Reachable state].

    Args:
        packages: installed ones whose code is followed.
        most_items: of a container that is followed.
    """

    packages: frozenset[str]
    most_items: float = MOST_ITEMS

    def follows(self, value: Any) -> bool:
        """Whether parts of an object are followed, which then has no value of its own."""
        if is_torch_module(value) or isinstance(value, (MethodType, functools.partial, property)):
            return True
        return self.is_users_class(type(value)) or is_wrapper(value)

    def is_users_class(self, kind: type) -> bool:
        """Whether a class was defined by a user's file, or in a notebook."""
        module = module_of(kind)
        if module == "builtins":
            return bool(kind.__flags__ & HEAP_TYPE)  # `exec` has made it
        return self.is_users_name(module)

    def is_users_function(self, function: FunctionType) -> bool:
        """Whether a function was defined by a user's file or in a notebook; one that was compiled
        from a text (by `dataclass`, `exec`) is its module's.
        """
        file = function.__code__.co_filename
        if is_users_file(file, self.packages):
            return True
        name = function.__module__
        return file.startswith("<") and (name in WITHOUT_MODULE or self.is_users_name(name))

    def is_users_module(self, module: ModuleType) -> bool:
        """Whether a module is a user's file, or a notebook."""
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file):
            return is_users_file(file, self.packages)
        package = sys.modules.get(module.__name__.partition(".")[0], module)
        if package is not module:
            return self.is_users_module(package)
        return module.__name__ == MAIN or getattr(module, "__spec__", None) is None

    def is_users_name(self, name: str) -> bool:
        """Whether the module of this name is a user's; one that is not loaded is."""
        module = sys.modules.get(name)
        return module is None or self.is_users_module(module)

    def parts(self, path: str, value: Any) -> Parts:
        """What a value consists of, by name."""
        if is_torch_module(value):
            yield from _parts_of_module(path, value)
        elif isinstance(value, FunctionType):
            if self.is_users_function(value):
                yield from own_parts(value)
                yield from globals_of(value)
            elif is_wrapper(value):
                yield path, own_dict(value)["__wrapped__"]
        elif isinstance(value, MethodType):
            yield path, value.__self__
            yield path, value.__func__
        elif isinstance(value, functools.partial):
            yield f"{path}.func", value.func
            yield f"{path}.args", (value.args, value.keywords)
        elif isinstance(value, property):
            yield from ((path, each) for each in (value.fget, value.fset, value.fdel))
        elif isinstance(value, ModuleType):
            if self.is_users_module(value):
                yield from attributes(value.__name__.rpartition(".")[2], value)
        elif isinstance(value, type):
            if self.is_users_class(value):
                yield from attributes(value.__qualname__, value)
                yield from ((base.__qualname__, base) for base in value.__bases__)
        elif isinstance(value, CONTAINERS):
            yield from self._parts_of_container(path, value)
        elif isinstance(value, GeneratorType):
            if value.gi_frame is not None:
                yield f"{path} locals", dict(value.gi_frame.f_locals)
        elif is_wrapper(value):
            yield path, value.__wrapped__
        elif self.is_users_class(type(value)):
            yield type(value).__qualname__, type(value)
            yield from attributes(path, value)

    def _parts_of_container(self, path: str, value: Any) -> Parts:
        if len(value) <= self.most_items:
            yield from _items(path, value)
        if self.is_users_class(type(value)):
            yield type(value).__qualname__, type(value)
            yield from attributes(path, value)


def module_of(kind: type) -> str:
    """The name of the module of a class; some of C libraries have a descriptor of this name."""
    name = kind.__module__
    return name if isinstance(name, str) else "builtins"


def is_torch_module(value: Any) -> bool:
    """Whether a value is an nn.Module."""
    nn = sys.modules.get("torch.nn")
    return nn is not None and isinstance(value, nn.Module)


def is_wrapper(value: Any) -> bool:
    """Whether an object says what it wraps; without a call of a user's `__getattr__`."""
    return isinstance(value, (staticmethod, classmethod)) or "__wrapped__" in own_dict(value)


def own_dict(value: Any) -> Mapping[str, Any]:
    """The attributes that an object holds itself."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _items(path: str, value: Any) -> Parts:
    """Of a container; keys that are no plain values are numbered, as their texts may be addresses."""
    if not isinstance(value, Mapping):
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(value))
        return
    for place, (key, item) in enumerate(list(value.items())):
        if type(key) in PLAIN:
            yield f"{path}[{key!r}]", item
        else:
            yield f"{path} key {place}", key
            yield f"{path}[{place}]", item


def attributes(path: str, value: Any) -> Parts:
    """Attributes of an object, module or class; of those that Python names, functions alone."""
    for name, item in list(own_dict(value).items()):
        if not name.startswith("__") or isinstance(item, FunctionType):
            yield f"{path}.{name}", item
    if isinstance(value, (type, FunctionType, ModuleType)):
        return
    for name, slot in _slots_of(type(value)):
        try:
            yield f"{path}.{name}", slot.__get__(value)
        except AttributeError:  # it has no value yet
            continue


def _slots_of(kind: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    """The `__slots__` of a class and its bases."""
    found = {
        name: slot
        for base in reversed(kind.__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType) and not name.startswith("__")
    }
    return tuple(found.items())


def _parts_of_module(path: str, module: Any) -> Parts:
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


def own_parts(function: FunctionType) -> Parts:
    """What a function closes over, its defaults and attributes."""
    code = function.__code__
    title = f"{Path(code.co_filename).stem}.{function.__qualname__}"
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{title}: {name}", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield f"{title}: defaults", (function.__defaults__, function.__kwdefaults__)
    yield from attributes(title, function)


def globals_of(function: FunctionType) -> Parts:
    """Globals that the code of a function names."""
    title = Path(function.__code__.co_filename).stem
    for name in sorted(names_in(function.__code__)):
        if name in function.__globals__:
            yield f"{title}.{name}", function.__globals__[name]


def names_in(code: CodeType) -> set[str]:
    """Names that code and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names
