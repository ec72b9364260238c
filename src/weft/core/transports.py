"""Names of the transports that ranks can be started on: "process", and each file of comm/ that opens a world of rank threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.errors import Fault

PROCESS = "process"
CPU_VARIABLE = "WEFT_CPU_TRANSPORT"
"""Environment variable: how tensors on the CPU travel between processes on one host."""
SHARED_MEMORY = "shared_memory"
CPU_TRANSPORTS = (SHARED_MEMORY, "gloo")
THREADS = "threads"
"""The file of weft's own rank threads."""
FOLDER = Path(__file__).parents[1] / "comm"
DECLARATION = re.compile(r"^open_world\b", re.MULTILINE)
"""The line of a transport that is selectable: `open_world = ThreadWorld`, a class whose objects have
the transports of all ranks.
"""


@cache
def thread_transports() -> tuple[str, ...]:
    """Transports between ranks that are threads of one process: the names of their files, which are
    read and not imported.
    """
    files = sorted(FOLDER.glob("*.py"))
    return tuple(file.stem for file in files if DECLARATION.search(file.read_text()))


def cpu_transport() -> str:
    """The choice of the environment, shared memory by default."""
    return os.environ.get(CPU_VARIABLE) or SHARED_MEMORY


def cpu_transport_faults() -> Iterator[Fault]:
    """The environment names another transport."""
    chosen = cpu_transport()
    if chosen not in CPU_TRANSPORTS:
        fix = f"unset {CPU_VARIABLE}, or {CPU_VARIABLE}=gloo"
        yield Fault(CPU_VARIABLE, "unknown", got=chosen, need=" or ".join(CPU_TRANSPORTS), fix=fix)


if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[(PROCESS, *thread_transports())]
