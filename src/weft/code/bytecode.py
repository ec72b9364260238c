"""What a code object computes, as text that is equal in every process: no file names, no line numbers, sets sorted."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType

IMPORT_NAME = dis.opmap["IMPORT_NAME"]
EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]


@functools.lru_cache(maxsize=4096)
def code_text(code: CodeType) -> str:
    """Instructions, constants and names of code and of the code inside it."""
    return repr(
        (
            code.co_code.hex(),
            code.co_flags,
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            getattr(code, "co_exceptiontable", b""),
            tuple(map(_constant_text, code.co_consts)),
        )
    )


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return code_text(constant)
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_constant_text, constant))})"
    if isinstance(constant, tuple):
        return f"({','.join(map(_constant_text, constant))})"
    return repr(constant)


def imported_by(code: CodeType) -> Iterator[str]:
    """Names of the modules that code imports when it runs, without the dots of relative ones."""
    argument = 0
    instructions = code.co_code
    for place in range(0, len(instructions), 2):
        argument = argument << 8 | instructions[place + 1]
        if instructions[place] == IMPORT_NAME:
            yield code.co_names[argument]
        if instructions[place] != EXTENDED_ARG:
            argument = 0
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from imported_by(constant)
