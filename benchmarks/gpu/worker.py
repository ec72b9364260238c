"""A process that runs the checks of one section, from a given one on.

Run: python -m benchmarks.gpu.worker SECTION FIRST LINES FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.report import Settings, rows_of
from benchmarks.gpu.sections import SECTIONS


def main(section: str, first: str, lines: str, folder: str) -> None:
    """Run the checks; a line for each begin, row and end."""
    settings = Settings(device="cuda:0", is_rehearsal=False, folder=Path(folder))
    checks = SECTIONS[section](settings)
    with Path(lines).open("a", buffering=1) as file:

        def write(kind: str, **fields: object) -> None:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

        for number, check in enumerate(checks):
            if number < int(first):
                continue
            write("begin", name=check.name, number=number, limit_s=check.limit_s)
            for row in rows_of(check, settings):
                write("row", **asdict(row))
        write("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
