"""Names of users' classes, functions and modules that are equal in every process: `class Layer (my_model.py)`."""

from __future__ import annotations

import re

FILE_MODULE = "weft_user_"
"""Start of the name of a module that is loaded from a path; its file's name and a hash follow."""
LOCALS = ".<locals>"


def module_label(name: str | None) -> str:
    """A module as messages name it: its file where it was loaded from a path, else its dotted name."""
    if name is None:
        return "no module"
    match = re.fullmatch(rf"{FILE_MODULE}(.+)_[0-9a-f]{{8}}", name)
    return f"{match[1]}.py" if match else name


def owner_label(kind: str, qualname: str, module: str | None) -> str:
    """The class or function at the top of a module that an object belongs to: of a method its class,
    of a closure the function that makes it.
    """
    head, _, inner = qualname.partition(LOCALS)
    owner, _, _ = head.rpartition(".")
    if kind == "function" and owner:
        kind, head = "class", owner
    elif kind == "class" and inner:
        kind = "function"
    return f"{kind} {head} ({module_label(module)})"
