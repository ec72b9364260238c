"""Weighted mixtures of sources: which source each sample of a run comes from, and which of that source's samples.

Note [Cycles]
    Weights are rounded to whole cycles of `CYCLE` samples, in which source k has n_k places, spread
    as evenly as possible: among the sources that are behind their share, the one whose next place
    is due first is chosen (Tijdeman 1980, "The chairman assignment problem"). So after any number
    of samples every source is within one of its share. Sample g of a run is place g mod CYCLE of
    cycle g div CYCLE, its source is a table look-up, and its number within the source is cycle x
    n_k + (places of k before it in the cycle): the same on every layout and after every resume.
    Each source has its own epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError, Fault

KEY = "data.mix"
CYCLE = 1000
"""Samples of one cycle: weights are kept to a thousandth."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MixtureSampler:
    """How often each source comes in a cycle, in order of the sources; see Note [Cycles]."""

    counts: tuple[int, ...]

    @cached_property
    def sources(self) -> Ints:
        """sources_C: the source of each place of a cycle."""
        counts = np.array(self.counts)
        length = int(counts.sum())
        num_chosen = np.zeros_like(counts)
        chosen = np.empty(length, dtype=np.int64)
        for place in range(length):
            # in whole numbers: shares in floating point could differ between machines, and with them the order
            is_behind = counts * (place + 1) > num_chosen * length
            due = (num_chosen + 1) / counts
            due_if_behind = np.where(is_behind, due, np.inf)
            source = int(due_if_behind.argmin())
            chosen[place] = source
            num_chosen[source] += 1
        return chosen

    @cached_property
    def places_before(self) -> Ints:
        """places_C: how many places of the same source come before each place of a cycle."""
        before = np.empty_like(self.sources)
        for source in range(len(self.counts)):
            is_own = self.sources == source
            before[is_own] = np.arange(is_own.sum())
        return before

    def at(self, places: Ints) -> tuple[Ints, Ints]:
        """The source of each of these samples of the run, and its place in the order of that
        source.
        """
        cycles, inside = np.divmod(places, len(self.sources))
        sources = self.sources[inside]
        counts = np.array(self.counts)
        before_cycle = cycles * counts[sources]
        before_in_cycle = self.places_before[inside]
        return sources, before_cycle + before_in_cycle

    @property
    def shares(self) -> tuple[float, ...]:
        """Exact share of each source."""
        total = sum(self.counts)
        shares = [count / total for count in self.counts]
        return tuple(shares)


def make_mixture_sampler(weights: Sequence[float]) -> MixtureSampler:
    """Weights as places of a cycle: rounded down, and the remaining places go to the largest
    remainders.

    Raises:
        DataError: a source that would have no place.
    """
    total = sum(weights)
    counts: list[int] = []
    rounded_up_by: list[float] = []
    for weight in weights:
        share = weight / total * CYCLE
        count = math.floor(share)
        counts.append(count)
        rounded_up_by.append(count - share)
    sources = range(len(weights))
    by_remainder = sorted(sources, key=rounded_up_by.__getitem__)
    num_left = CYCLE - sum(counts)
    for source in by_remainder[:num_left]:
        counts[source] += 1
    if 0 in counts:
        without_place = counts.index(0)
        weight = weights[without_place]
        raise DataError(
            Fault(
                KEY,
                "a weight is too small",
                got=f"{weight:g} of {total:g}",
                need=f"at least 1/{CYCLE} of the sum",
                fix="leave that source out, or raise its weight",
            )
        )
    return MixtureSampler(tuple(counts))


def read_mix(words: Sequence[str]) -> Mapping[str, float]:
    """`"a=0.7" "b=0.3"` as sources with their weights.

    Raises:
        DataError: with every word that is no such pair.
    """
    faults: list[Fault] = []
    weights: dict[str, float] = {}
    for word in words:
        source, equals, text = word.rpartition("=")
        weight = _number(text)
        if not equals or not source:
            faults.append(
                Fault(
                    KEY,
                    "names no weight",
                    got=repr(word),
                    need="SOURCE=WEIGHT",
                    fix=f'for example "{word}=0.5"',
                )
            )
        elif weight is None or not 0 < weight < math.inf:
            what = f"the weight of {source} is not valid"
            faults.append(
                Fault(KEY, what, got=repr(text), need="a number above 0", fix=f'"{source}=0.5"')
            )
        elif source in weights:
            faults.append(
                Fault(
                    KEY,
                    "names a source twice",
                    got=repr(source),
                    need="each once",
                    fix="add its weights",
                )
            )
        else:
            weights[source] = weight
    if faults:
        raise DataError(*faults)
    return weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
