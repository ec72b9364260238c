"""Keeps torch's compiler from being imported where nothing is compiled: by shapes and dispatch modes.

Note [No compiler for shapes]
    torch excludes some of its own functions from compilation: most operations on the meta device,
    and `__torch_dispatch__` of modes. It wraps each at its first call by `torch._dynamo.disable`, and
    so imports the compiler: 829 modules, a second of computing and 70 MB in each process. A program
    that has not imported the compiler compiles nothing. There the functions are called as they are;
    once the compiler is imported, torch's own wrapper is used. Optimizers of torch.optim import it at
    their first step in any case; those of weft do not.
    The places of these functions are torch's own affair: where a torch has others, it imports its
    compiler as before.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch._compile
import torch._decomp
from torch.utils._python_dispatch import TorchDispatchMode

COMPILER = "torch._dynamo"
OPERATIONS = "torch._refs"
"""Modules of torch's operations that are written in Python."""
WRAPPER = "__dynamo_disable"
"""Attribute in which torch keeps the wrapper of a function."""
Mode = TypeVar("Mode", bound=TorchDispatchMode)


class UntilCompilerIsImported:
    """A function as it is until the compiler is imported, then in torch's own wrapper."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        disable = getattr(sys.modules.get(COMPILER), "disable", None)
        if disable is None:
            return self.function(*args, **kwargs)
        wrapper = disable(self.function, True, wrapping=False)
        setattr(self.function, WRAPPER, wrapper)
        return wrapper(*args, **kwargs)


@functools.cache
def keep_compiler_unimported() -> None:
    """Have no operation on the meta device import the compiler; see Note [No compiler for shapes]."""
    _call_plainly(_excluded_functions())


def uncompiled_mode(mode: type[Mode]) -> type[Mode]:
    """Class decorator: `__torch_dispatch__` of the mode imports no compiler."""
    _call_plainly([mode.__torch_dispatch__])
    return mode


def _excluded_functions() -> Iterator[object]:
    """Functions of which torch excludes some, or functions behind them, from compilation."""
    decompositions = getattr(torch._decomp, "global_decomposition_table", {})
    # as lists: another rank thread may import what registers more
    for functions in list(decompositions.values()):
        yield from list(functions.values())
    for name, module in list(sys.modules.items()):
        if name.startswith(OPERATIONS):  # they call each other
            yield from list(vars(module).values())


def _call_plainly(functions: Iterable[object]) -> None:
    """Treat these functions, and all that they wrap."""
    excluding = getattr(torch._compile, "_disable_dynamo", None)
    if not isinstance(excluding, FunctionType):
        return
    wrapped_code = excluding.__code__.co_consts
    left = list(functions)
    seen: set[int] = set()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        wrapped = _closed_over(function)
        left += wrapped.values()
        excluded = wrapped.get("fn")
        is_excluding = function.__code__ in wrapped_code
        # a function that torch has wrapped already stays so: its compiler is imported by then
        if is_excluding and isinstance(excluded, FunctionType) and not hasattr(excluded, WRAPPER):
            setattr(excluded, WRAPPER, UntilCompilerIsImported(excluded))


def _closed_over(function: FunctionType) -> dict[str, object]:
    """The values of variables of outer functions that it reads, by name."""
    values: dict[str, object] = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            values[name] = cell.cell_contents
    return values
