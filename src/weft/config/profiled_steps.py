"""Which steps of a run are profiled: `profile = "10:13"` are the steps 10, 11 and 12, as a range of Python."""

from __future__ import annotations

import re

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
