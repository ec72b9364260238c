"""The stream that a view writes to: where it cannot be written any more, a run goes on without it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


class ViewOutput:
    """A stream whose end is not the end of the run.

    The reader of a pipe may have ended, the terminal may be closed, or the disk full: then the
    descriptor is pointed at /dev/null, so that no later flush fails. All but the end of a pipe's
    reader is said once on stderr.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_open = True

    def write(self, text: str) -> None:
        """Write and flush, while that is possible."""
        if not self._is_open:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._is_open = False
            self._discard()
            if not isinstance(error, BrokenPipeError):
                _warn(f"warning: no more output ({error.strerror}); the run continues\n")

    def _discard(self) -> None:
        with suppress(OSError):  # a stream without a descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)


def _warn(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
