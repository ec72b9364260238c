"""Garbage collection by step: every rank collects after the same steps, not each at a time of its own.

Note [Garbage collection by step]
    Python collects cyclic garbage whenever enough objects have been made, which happens on each rank in
    another step, and all ranks wait for the slowest one. While a run trains, that is off; after
    every so many steps each rank collects what has been made since, which passes over the objects of
    imported modules and of the model. One collection in `WHOLE` looks at all objects: some
    that were in use at a collection become garbage later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NEW, ALL = 1, 2
"""Generations that a collection includes: of objects since the last one; of all objects."""
WHOLE = 50
"""Collections up to one of all objects."""


@contextmanager
def collecting_by_step(every: int) -> Iterator[Callable[[int], None]]:
    """While it is open, garbage is collected only by its function, which is called with the number of
    a step that has ended. See Note [Garbage collection by step].

    Args:
        every: steps between collections; 0: Python collects whenever it does.
    """
    was_enabled = gc.isenabled()
    if not every or not was_enabled:
        yield lambda number: None
        return

    def after_step(number: int) -> None:
        if number % every == 0:
            gc.collect(ALL if number % (WHOLE * every) == 0 else NEW)

    gc.disable()
    try:
        yield after_step
    finally:
        gc.enable()
