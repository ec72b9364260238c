"""Lines on the standard error: notes and errors, on the first rank of each machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

from weft.start.environment import LOCAL_RANK_VARIABLES, is_first


def print_messages(lines: Iterable[str]) -> None:
    """Print lines on stderr, on the first rank of each machine."""
    if is_first(os.environ, LOCAL_RANK_VARIABLES):
        for line in lines:
            print_error(line)


def print_error(text: str) -> None:
    """Print on stderr; where that cannot be written any more, the exit code says enough."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)
