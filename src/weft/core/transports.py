"""Names of the transports that ranks can be started on: "process", and each file of comm/ that opens a world of rank threads."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

PROCESS = "process"
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


if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[(PROCESS, *thread_transports())]
