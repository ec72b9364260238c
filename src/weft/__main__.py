"""Entry point of `python -m weft` and of the program `weft`."""

from __future__ import annotations

import gc
import signal
import sys

from weft.errors import EXIT_INTERRUPTED
from weft.set_up import MIN_PYTHON, explain_missing


def main() -> int:
    """Import and run the command line; Ctrl-C ends it without a traceback, also while it is
    imported, and what it cannot be imported without is one line.
    """
    try:
        if sys.version_info[:2] < MIN_PYTHON:
            return explain_missing("weft", sys.argv[1:])
        try:
            from weft.cli import main as run_command  # late: see above
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("weft."):
                raise
            return explain_missing(error.name, sys.argv[1:])
        code = run_command()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C while Python ends
    gc.freeze()  # its last collection would walk through all modules: 0.6 s
    return code


if __name__ == "__main__":
    sys.exit(main())
