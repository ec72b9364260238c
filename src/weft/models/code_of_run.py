"""The identity of the code of a run: of its model and its optimizer, where they are a user's. Imports no torch itself."""

from __future__ import annotations

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
    """Of a user's optimizer class."""
    reference, _, class_name = name.rpartition(":")
    optimizer = load_object(name, key=OPTIMIZER)
    module = load_module(reference, key=OPTIMIZER)
    reads = reads_of(module)
    code = identity_of({class_name: optimizer}, module=module.__name__, packages=reads.packages)
    return code | identity_of_reads(reads, file_folder(reference))
