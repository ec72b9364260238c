"""A process that is killed while it saves; a server that has run no torch forks one per request.

The server reads a line (a run folder, and the step to begin with) and forks. The child writes its
process id, then saves checkpoint after checkpoint, a few megabytes each, and keeps the two newest;
it says when it begins one and when it has committed it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from tests.checkpoint.states import facts_of
from weft.checkpoint.commit import commit
from weft.checkpoint.folder import checkpoint_path, prune, remove_leftovers, temporary_path
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem
from weft.core.axes import Box

RANKS = 2
ROWS = 256
COLUMNS = 512
TENSORS = 4
"""Four float32 tensors of half a MiB."""


def value_of(step: int, index: int) -> int:
    """What every entry of a tensor is."""
    return step * TENSORS + index


def saved(run: Path, step: int) -> None:
    """A checkpoint of rows that two ranks share."""
    final = checkpoint_path(run, step)
    half = ROWS // RANKS
    tmp = temporary_path(final)
    writings = []
    for rank in range(RANKS):
        box = Box(lo=(rank * half, 0), hi=((rank + 1) * half, COLUMNS))
        held = [
            WriteItem(
                name=f"model/t{index}",
                shape=(ROWS, COLUMNS),
                box=box,
                tensor=torch.full(box.shape, float(value_of(step, index))),
            )
            for index in range(TENSORS)
        ]
        writings.append(start_write(tmp, rank, held))
    for writing in writings:
        writing.wait()
    commit(tmp, final, facts_of(step), ranks=RANKS)


def live(run: Path, step: int) -> None:
    """Serve requests until the process is killed."""
    remove_leftovers(run)
    while True:
        tell(f"begin {step}")
        saved(run, step)
        tell(f"saved {step}")
        prune(run, 2)
        step += 1


def tell(line: str) -> None:
    """In one call: a line is whole or not there."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    """Serve until standard input is closed; every child is waited for before the next."""
    for line in sys.stdin:
        run, step = line.rsplit(maxsplit=1)
        if pid := os.fork():
            os.waitpid(pid, 0)
            tell("dead 0")
            continue
        try:
            tell(f"pid {os.getpid()}")
            live(Path(run), int(step))
        except BaseException:  # noqa: BLE001 - the forked child has no caller
            traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
