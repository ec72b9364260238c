"""Which instructions of a user's code a forward executes: a branch on a size shows as one that runs at some sizes alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import nn

from weft.code.users_files import LIBRARIES, is_users_file

_installing = threading.Lock()
"""Python allows one thread at a time to install a trace function: while an audit hook that is called
then runs, as that of `weft.code.reads`, another thread's `sys.settrace` raises RuntimeError."""


def packages_of(blocks: Iterable[nn.Module]) -> frozenset[str]:
    """Top-level packages that define modules of a model: of installed ones, too, they are users'."""
    found = {type(module).__module__ for block in blocks for module in block.modules()}
    return frozenset(name.partition(".")[0] for name in found) - LIBRARIES


@dataclass
class ExecutedCode:
    """Collects, while it is active, the instructions of users' code that this thread executes.

    Attributes:
        packages: as `packages_of` has them.
        codes: identity of a code object -> it.
        instructions: identity of a code object, offset of an instruction in it.
    """

    packages: frozenset[str]
    codes: dict[int, CodeType] = field(default_factory=dict)
    instructions: set[tuple[int, int]] = field(default_factory=set)
    _before: Any = None

    def __enter__(self) -> ExecutedCode:
        self._before = sys.gettrace()
        with _installing:
            sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_error: object) -> None:
        with _installing:
            sys.settrace(self._before)

    def _enter_function(self, frame: FrameType, event: str, arg: object) -> Any:
        """Called by Python for every function; what is not a user's is not followed."""
        code = frame.f_code
        if not is_users_file(code.co_filename, self.packages):
            return None
        self.codes[id(code)] = code
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._note_instruction

    def _note_instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.instructions.add((id(frame.f_code), frame.f_lasti))
        return self._note_instruction

    def add(self, other: ExecutedCode) -> None:
        """Add what another one has found."""
        self.codes.update(other.codes)
        self.instructions |= other.instructions

    def first_line_beyond(self, *others: ExecutedCode) -> str:
        """Place of the first instruction that none of the others has executed, "model.py, line 12";
        empty where there is none.
        """
        left = self.instructions.difference(*(other.instructions for other in others))
        places = sorted(self._place(*instruction) for instruction in left)
        if not places:
            return ""
        file, line = places[0]
        return f"{file}, line {line}"

    def _place(self, code_id: int, offset: int) -> tuple[str, int]:
        code = self.codes[code_id]
        line = code.co_firstlineno
        for start, end, number in code.co_lines():
            if start <= offset < end and number is not None:
                line = number
        return Path(code.co_filename).name, line
