"""When a search of layouts ends: its limits, and a clock of the processor seconds it has taken.

Note [Time limit]
    With a limit of seconds (of one core), bounds from larger blocks are measured for
    `BOUNDING_SHARE` of it, most plausible shardings first: tp and ep within a node, and of these the
    smallest tp; the others stay without a bound. Simulations end after `RANKING_SHARE`. Where the
    shardings with the best bounds were found not to fit until `NOTHING_FITS_SHARE`, the rest of the
    ranking takes the leanest alone: full recomputation and the smallest micro-batch. A ranking that
    the limit has ended goes on to `NEIGHBOURS_SHARE` beside the best layout found, with the
    shardings that differ from it in one option: a good layout has often a better one there, say
    with a larger micro-batch. No layout is measured as a whole that would end after the limit, if
    it took as long as the longest one so far; the first one is made in any case. Without a limit
    the result is the same on every machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

MOST_MEASURED = 8
"""Layouts that a search measures."""
RANKING_SHARE, FRONT_RANKING_SHARE = 0.42, 0.56
"""Of the seconds of a search, after which the ranking by the target ends, and the other one."""
BOUNDING_SHARE, NOTHING_FITS_SHARE, NEIGHBOURS_SHARE = 0.25, 0.34, 0.62
"""Of the seconds of a search; see Note [Time limit]."""
USUAL_SHARE = 0.62
"""Of the seconds of a search, after which no more of the usual layouts are simulated."""
SPLITS_SHARE = 0.68
"""Of the seconds of a search, after which no more layers of pipeline stages are tried."""


@dataclass(frozen=True)
class SearchLimits:
    """When a search ends.

    Attributes:
        memory_bytes: that a rank may use.
        most_measured: layouts that are measured.
        seconds: for all; None: no limit. See Note [Time limit].
        has_front: whether a Pareto front of time and memory is looked for.
        splits: whether the layers of pipeline stages are searched.
        reorders: whether a measured layout may take an order of its axes that is not searched.
    """

    memory_bytes: float
    most_measured: int = MOST_MEASURED
    seconds: float | None = None
    has_front: bool = True
    splits: bool = True
    reorders: bool = False


class Clock:
    """Seconds since the begin of a search; see Note [Time limit]."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.begin = time.process_time()
        self.longest_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.process_time() - self.begin

    def is_over(self, share: float) -> bool:
        """Whether this share of the limit is over, or would be after one more measurement."""
        if self.limit_s is None:
            return False
        ahead_s = self.longest_s if share == 1.0 else 0.0
        return self.elapsed_s + ahead_s > share * self.limit_s

    @property
    def is_last_measurement(self) -> bool:
        """Whether the limit leaves time for one more measurement, but not for two."""
        if self.limit_s is None:
            return False
        return self.elapsed_s + 2 * self.longest_s > self.limit_s

    def note(self, begin_s: float) -> None:
        """A measurement that began then has ended."""
        self.longest_s = max(self.longest_s, self.elapsed_s - begin_s)
