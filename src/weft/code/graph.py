"""All code and values that a user's model reaches, as texts by name that are equal in every process. No torch.

Note [Identity of code]
    Classes, functions, modules, and global variables that functions name are nodes of a graph. The
    text of a node is what it consists of (`weft.code.reachable`), in a fixed order: values as they
    are, other nodes by their labels. So the texts of all nodes describe the whole graph, cycles
    included, and two graphs are equal if their texts are. A label is a kind, a name and a module;
    different nodes of one name are numbered in the order of their discovery.

    Code is followed where it is a user's. Of a library the name counts, the version of its
    distribution, and functions of users that were put into it (`F.gelu = mine`).
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from weft.code.bytecode import code_text, imported_by
from weft.code.labels import module_label, owner_label
from weft.code.reachable import (
    CONTAINERS,
    PLAIN,
    Parts,
    Reach,
    Walk,
    attributes,
    globals_of,
    is_wrapper,
    module_of,
    names_in,
    own_dict,
    own_parts,
)
from weft.code.users_files import package_of_file
from weft.code.values import (
    WITHOUT_VALUE,
    HashedValue,
    NoValueError,
    kind_of,
    short_digest,
    value_of,
)

PATCHED = ("torch", "torch.nn.functional", "torch.nn.init", "torch.Tensor", "torch.nn.Module")
"""Where functions of users are looked for in any case: all modules of a library compute by these."""
SKIPPED = frozenset({"_abc_impl"})
"""Attributes of classes that only cache."""
MOST_CHARS = 200
"""Longer paths of values are hashed."""
CALLABLE = (FunctionType, BuiltinFunctionType, type, functools.partial)
"""What attributes of libraries are hashed by name, as anything may be put in their place."""
UNSEEN = frozenset({"globals", "eval", "exec"})
"""Functions that reach code by texts: unseen where a module has no source to be hashed."""
ASKS_COMPILER = frozenset({"is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling"})
"""Functions of torch and transformers that say whether torch.compile runs the code that calls them."""
COMPILED = "_torchdynamo_orig_callable"
"""Attribute of a compiled function: what was compiled."""


@dataclass(frozen=True)
class _Variable:
    """A global variable of a module."""

    value: Any


@dataclass
class CodeGraph:
    """The graph of what some values reach; see Note [Identity of code].

    Attributes:
        reach: what is followed.
        texts: name of a part -> texts of its nodes.
        unknown: what has no value that is equal in another process.
        modules: of users, by name.
        packages: installed ones that are used.
        lazy: names of modules that code imports when it runs, with the package of the code.
        asks_compiler: functions that ask whether they are compiled.
    """

    reach: Reach
    texts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unknown: dict[str, None] = field(default_factory=dict)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    lazy: set[tuple[str, str]] = field(default_factory=set)
    asks_compiler: dict[str, None] = field(default_factory=dict)
    _labels: dict[tuple[str, int | str], str] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _waiting: deque[tuple[str, str, Any]] = field(default_factory=deque)
    _kept: list[Any] = field(default_factory=list)  # so that ids stay their own
    _values: dict[int, HashedValue] = field(default_factory=dict)  # until their parts are visited
    _scanned: set[int] = field(default_factory=set)
    _open_sets: set[int] = field(default_factory=set)

    def add(self, name: str, value: Any, module: str) -> None:
        """Add a value under a name, and all that it reaches."""
        if self._node_label(value) is None:
            self._variable_label(name, value, module)
        self._visit()

    def add_patches(self) -> None:
        """Look for functions of users in the places that all modules of torch compute by."""
        for name in PATCHED:
            owner: Any = sys.modules.get("torch")
            for word in name.split(".")[1:]:
                owner = own_dict(owner).get(word) if owner is not None else None
            if owner is not None:
                self._scan(owner, depth=0)
        self._visit()

    def digests(self) -> dict[str, str]:
        """Name of a part -> digest of the texts of its nodes."""
        return {
            part: short_digest("\n\n".join(sorted(texts)).encode())
            for part, texts in self.texts.items()
        }

    def _visit(self) -> None:
        while self._waiting:
            part, label, node = self._waiting.popleft()
            self.texts[part].append(f"{label}\n" + "\n".join(self._lines(part, node)))

    # nodes and their labels

    def _label(self, part: str, name: str, node: Any) -> str:
        """The label of a node, which is visited later where it is new."""
        value = node.value if isinstance(node, _Variable) else node
        place = (name, repr(value) if type(value) in PLAIN else id(value))
        if place not in self._labels:
            self._counts[name] += 1
            number = self._counts[name]
            self._labels[place] = name if number == 1 else f"{name} #{number}"
            self._kept.append(value)
            self._waiting.append((part, self._labels[place], node))
        return self._labels[place]

    def _variable_label(self, name: str, value: Any, module: str | None) -> str:
        part = f"variable {name} ({module_label(module)})"
        return self._label(part, part, _Variable(value))

    def _node_label(self, value: Any) -> str | None:
        """The label of a class, function or module; None: the value is no node."""
        if isinstance(value, FunctionType):
            return self._function_label(value)
        if isinstance(value, type):
            return self._class_label(value)
        if isinstance(value, ModuleType):
            return self._module_label(value)
        return None

    def _function_label(self, function: FunctionType) -> str | None:
        module, name = function.__module__, function.__qualname__
        if self._is_users(function):
            self._note_module(module)
            label = f"function {name} ({module_label(module)})"
            return self._label(owner_label("function", name, module), label, function)
        self._note_package(function.__code__.co_filename)
        if COMPILED in own_dict(function) or _global_value(function) is not function:
            return None  # a library has made it, for one call
        self._note_library(module)
        return f"library {module}.{name}"

    def _is_users(self, function: FunctionType) -> bool:
        """Whether a function is a user's, or was made by a library in its place, as decorators do."""
        if COMPILED in own_dict(function):
            return False
        name = function.__module__ or "builtins"
        return self.reach.is_users_function(function) or self.reach.is_users_name(name)

    def _class_label(self, kind: type) -> str:
        module, name = module_of(kind), kind.__qualname__
        if self.reach.is_users_class(kind):
            self._note_module(module)
            label = f"class {name} ({module_label(module)})"
            return self._label(owner_label("class", name, module), label, kind)
        self._note_library(module)
        for base in kind.__mro__:
            self._scan(base, depth=0)
        return f"library {module}.{name}"

    def _module_label(self, module: ModuleType) -> str:
        if self.reach.is_users_module(module):
            self._note_module(module.__name__)
            part = f"module {module_label(module.__name__)}"
            return self._label(part, part, module)
        self._note_library(module.__name__)
        return f"library {module.__name__}"

    def _note_module(self, name: str | None) -> None:
        module = sys.modules.get(name or "")
        if module is not None:
            self.modules[module.__name__] = module

    def _note_library(self, name: str) -> None:
        """A module of a library: its package, and functions of users in it."""
        module = sys.modules.get(name)
        if module is not None:
            self._note_package(getattr(module, "__file__", None) or "")
            self._scan(module, depth=1)

    def _note_package(self, file: str) -> None:
        package = package_of_file(file).partition(".")[0]
        if package:
            self.packages.add(package)

    def _scan(self, owner: Any, *, depth: int) -> None:
        """Functions of users in a class or module of a library, and in modules that it names."""
        if id(owner) in self._scanned:
            return
        self._scanned.add(id(owner))
        home = owner.__name__
        if isinstance(owner, type):
            home = f"{module_of(owner)}.{owner.__qualname__}"
        for name, value in list(own_dict(owner).items()):
            if type(value) is FunctionType and self.reach.is_users_function(value):
                part = f"function {home}.{name} (replaced)"
                self._label(part, part, _Variable(value))
            elif depth and issubclass(type(value), type) and module_of(value) == home:
                self._scan(value, depth=0)  # layers that the classes which a user names are made of
            elif depth and issubclass(type(value), ModuleType) and _is_of(value, home):
                self._scan(value, depth=depth - 1)

    # what a node consists of

    def _lines(self, part: str, node: Any) -> Iterator[str]:
        if isinstance(node, _Variable):
            yield from self._text(part, "", node.value)
        elif isinstance(node, FunctionType):
            yield short_digest(code_text(node.__code__).encode())
            for path, value in own_parts(node):
                yield from self._text(part, path.partition(".")[2], value)
            yield from self._global_lines(part, node)
        elif isinstance(node, type):
            yield f"bases {[self._class_label(base) for base in (*node.__bases__, type(node))]}"
            for path, value in sorted(attributes("", node), key=lambda each: each[0]):
                if path.removeprefix(".") not in SKIPPED:
                    yield from self._text(part, path, value)
        else:
            for path, value in sorted(attributes("", node), key=lambda each: each[0]):
                yield from self._text(part, path, value)

    def _global_lines(self, part: str, function: FunctionType) -> Iterator[str]:
        """Global variables that a function names, and attributes of modules among them."""
        names = names_in(function.__code__)
        where = function.__module__
        for path, value in globals_of(function):
            name = path.rpartition(".")[2]
            yield f"{name}: {self._name_of(name, value, where)}"
            if isinstance(value, ModuleType):
                yield from self._used_of_module(value, names, {id(value)})
        for name in imported_by(function.__code__):
            yield from self._import_lines(name, function, names)
        if names & UNSEEN and not getattr(sys.modules.get(where or ""), "__file__", None):
            called = ", ".join(sorted(names & UNSEEN))
            self.unknown.setdefault(f"{part}: it calls {called}")
        if _asks_compiler(function, names):
            self.asks_compiler.setdefault(f"{function.__qualname__} ({module_label(where)})")

    def _name_of(self, name: str, value: Any, module: str | None) -> str:
        """A node, or the variable that holds a value."""
        if isinstance(value, ModuleType):
            return f"module {module_label(value.__name__)}"  # what is used of it follows
        if isinstance(value, BuiltinFunctionType) and not value_of(value).parts:
            return value_of(value).text
        return self._node_label(value) or self._variable_label(name, value, module)

    def _used_of_module(self, module: ModuleType, names: set[str], seen: set[int]) -> Iterator[str]:
        """Attributes of a module that code names, maybe."""
        is_users = self.reach.is_users_module(module)
        if is_users:
            self._note_module(module.__name__)
        else:
            self._note_library(module.__name__)
        content = own_dict(module)
        for name in sorted(names & content.keys()):
            value = content[name]
            if isinstance(value, ModuleType):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from self._used_of_module(value, names, seen)
            elif is_users or isinstance(value, CALLABLE) or self.reach.is_users_class(type(value)):
                meaning = self._name_of(name, value, module.__name__)
                yield f"{module_label(module.__name__)}.{name}: {meaning}"
            elif isinstance(value, PLAIN) and not name.startswith("__"):
                yield f"{module.__name__}.{name}: {value!r}"
        if is_users and isinstance(content.get("__getattr__"), FunctionType):
            yield f"{module_label(module.__name__)}: {self._node_label(content['__getattr__'])}"

    def _import_lines(self, name: str, function: FunctionType, names: set[str]) -> Iterator[str]:
        """What code uses of a module that it imports when it runs."""
        package = str(function.__globals__.get("__package__") or "")
        for full in (name, f"{package}.{name}".strip(".")):
            module = sys.modules.get(full)
            if module is not None:
                yield from self._used_of_module(module, names, {id(module)})
        self.lazy.add((package, name))

    # values

    def _text(self, part: str, path: str, value: Any) -> Iterator[str]:
        """Lines of a value and all that it reaches, up to other nodes."""
        walk = Walk(self._inner_parts)
        for visit in walk.visit(path, value):
            if visit.first is not None:
                yield f"{visit.path} as {visit.first}"
                continue
            try:
                yield f"{visit.path} {self._token(part, visit.value)}"
            except NoValueError as error:
                self.unknown.setdefault(f"{part}: {error}")

    def _token(self, part: str, value: Any) -> str:
        """What is known of a value, apart from its parts."""
        if isinstance(value, PLAIN):
            if type(value) in PLAIN:
                return repr(value)
            base: Any = next(kind for kind in PLAIN if isinstance(value, kind))
            return f"{self._class_label(type(value))} {base.__repr__(value)}"
        label = self._node_label(value)
        if label is not None:
            return label
        if isinstance(value, (set, frozenset)):
            return f"{kind_of(value)} {self._set_items(part, value)}"
        if isinstance(value, WITHOUT_VALUE):
            return kind_of(value)
        if isinstance(value, CONTAINERS):
            return f"{kind_of(value)} {len(value)}"
        if isinstance(value, FunctionType) or self.reach.follows(value):
            return f"{kind_of(value)} {self._class_label(type(value))}"
        self._values[id(value)] = found = value_of(value)
        return found.text

    def _set_items(self, part: str, value: set[Any] | frozenset[Any]) -> list[str]:
        """Digests of the items of a set, sorted."""
        if id(value) in self._open_sets:
            return ["itself"]
        self._open_sets.add(id(value))
        texts = ["\n".join(self._text(part, "", item)) for item in value]
        self._open_sets.discard(id(value))
        return sorted(short_digest(text.encode()) for text in texts)

    def _inner_parts(self, path: str, value: Any) -> Parts:
        """Parts of a value that is no node."""
        if (
            len(path) > MOST_CHARS
        ):  # of chains: the texts would grow with the square of their length
            path = short_digest(path.encode())
        if (
            isinstance(value, (set, frozenset, *WITHOUT_VALUE))
            or self._node_label(value) is not None
        ):
            return
        if isinstance(value, FunctionType):  # of a library, made when it was called: a wrapper
            yield from _parts_of_wrapper(path, value)
        elif isinstance(value, CONTAINERS) or self.reach.follows(value):
            yield from self.reach.parts(path, value)
            factory = getattr(value, "default_factory", None) if isinstance(value, dict) else None
            if factory is not None:
                yield f"{path} default", factory
        elif id(value) in self._values:
            found = self._values.pop(id(value))
            yield from ((f"{path} {name}", item) for name, item in found.parts)


def _asks_compiler(function: FunctionType, names: set[str]) -> bool:
    """Whether a function names one of ASKS_COMPILER, or a global variable that is one."""
    known = {value.__name__ for _, value in globals_of(function) if isinstance(value, FunctionType)}
    return not ASKS_COMPILER.isdisjoint(names | known)


def _is_of(module: ModuleType, name: str) -> bool:
    """Whether a module is in the package of this name, or in that of a name in it."""
    return module.__name__.partition(".")[0] == name.partition(".")[0]


def _global_value(function: FunctionType) -> Any:
    """What a function's module and name mean."""
    value: Any = sys.modules.get(function.__module__ or "")
    for name in function.__qualname__.split("."):
        value = None if value is None else getattr(value, name, None)
    return value


def _parts_of_wrapper(path: str, function: FunctionType) -> Parts:
    """What a function consists of that a library has made around a user's."""
    attributes_of_it: Mapping[str, Any] = own_dict(function)
    if COMPILED in attributes_of_it:
        yield f"{path} compiled", attributes_of_it[COMPILED]
        return
    yield f"{path} code", code_text(function.__code__)
    if is_wrapper(function):
        yield f"{path} wrapped", attributes_of_it["__wrapped__"]
    yield from ((f"{path} {place}", value) for place, (_, value) in enumerate(own_parts(function)))
