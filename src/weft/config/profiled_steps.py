"""Which steps of a run are profiled: `profile = "10:13"` are the steps 10, 11 and 12, as a range of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

from weft.errors import Fault

KEY = "profile"
MOST_STEPS = 100
"""Steps of one profile: its records are kept in memory until the last one has ended."""
STEPS = re.compile(r"(\d{1,12}):(\d{1,12})")


def profiled_steps(text: str | None) -> range:
    """The numbers of the steps (the first step is 1); none for None.

    Raises:
        ValueError: it is no such text.
    """
    if text is None:
        return range(0)
    found = STEPS.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no range of steps")
    return range(int(found[1]), int(found[2]))


def profile_faults(text: str | None, *, num_steps: int) -> Iterator[Fault]:
    """The steps of the profile are steps of the run, and not too many."""
    try:
        steps = profiled_steps(text)
    except ValueError:
        need = "FIRST:END, with steps from 1 and the last one before END"
        yield Fault(KEY, "cannot be read", got=repr(text), need=need, fix="--profile 10:13")
        return
    if text is None:
        return
    if steps.start < 1:
        fix = f"--profile 1:{max(steps.stop, 2)}"
        yield Fault(KEY, "the first step is 1", got=text, need="steps from 1", fix=fix)
    elif not steps:
        what = "holds no step: the end is not part of it, as in Python"
        yield Fault(KEY, what, got=text, fix=f"--profile {steps.start}:{steps.start + 3}")
    elif len(steps) > MOST_STEPS:
        fix = f"--profile {steps.start}:{steps.start + 3}"
        yield Fault(KEY, "has too many steps", str(len(steps)), f"at most {MOST_STEPS}", fix)
    elif steps[-1] > num_steps:
        first = max(1, num_steps - 2)
        fix = f"--profile {first}:{num_steps + 1}"
        what = "has steps after the end of the run"
        yield Fault(
            KEY,
            what,
            got=text,
            need=f"steps up to {num_steps}, END at most {num_steps + 1}",
            fix=fix,
        )
