"""Entry point of `python -m weft` and of the program `weft`."""

from __future__ import annotations

import signal
import sys

from weft.errors import EXIT_INTERRUPTED


def main() -> int:
    """Import and run the command line; Ctrl-C ends it without a traceback, also while it is
    imported.
    """
    try:
        from weft.cli import main as run_command  # late: see above

        code = run_command()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C while Python ends
    return code


if __name__ == "__main__":
    sys.exit(main())
