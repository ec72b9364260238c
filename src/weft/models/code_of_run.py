"""The identity of the code of a run: of its model and its optimizer, where they are a user's. Imports no torch itself."""

from __future__ import annotations

import functools
from types import ModuleType

from weft.code.identity import CodeIdentity, identity_of, identity_of_reads
from weft.config.optimizers import is_user_class
from weft.config.user_code import file_folder, load_module, load_object, reads_of
from weft.models import FAMILIES

OPTIMIZER = "optim.name"


def code_of_run(model: str, optimizer: str) -> CodeIdentity:
    """The identity of the users' code that a run computes with, and of what it has read so far;
    without parts where all is weft's.

    Args:
        model: name of a family.
        optimizer: `optim.name`.

    Raises:
        ConfigError: it cannot be imported.
    """
    found: CodeIdentity = getattr(FAMILIES[model], "code", CodeIdentity())
    return found | _code_of_optimizer(optimizer) if is_user_class(optimizer) else found


def _code_of_optimizer(name: str) -> CodeIdentity:
    """The identity of the code of a user's optimizer class."""
    reference, _, class_name = name.rpartition(":")
    module = load_module(reference, key=OPTIMIZER)
    optimizer = load_object(name, key=OPTIMIZER)
    reads = identity_of_reads(reads_of(module), file_folder(reference))
    return _code_of_class(optimizer, class_name, module) | reads


@functools.lru_cache(maxsize=8)
def _code_of_class(optimizer: type, name: str, module: ModuleType) -> CodeIdentity:
    """Of a class, as it is when it is asked for first: training may change what it reaches."""
    packages = reads_of(module).packages
    return identity_of({name: optimizer}, module=module.__name__, packages=packages)
