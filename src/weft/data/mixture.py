"""Owns mixtures of sources: which source each sample of a run comes from, and which of its samples.

Note [Turns]
    Weights are brought to whole turns of `CYCLE` samples, in which source k has n_k places, spread as evenly as can be: of
    the sources that are behind their share the one goes first whose next place is due first (Tijdeman 1980, "The chairman
    assignment problem"). So after any number of samples every source is within one of its share. Sample g of a run is
    place g mod CYCLE of turn g div CYCLE, its source is a look into a table, and its number within the source is
    turn x n_k + places of k before: the same on every layout and after every resume. Each source walks through its own
    epochs.
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
"""Samples of one turn: weights are kept to a thousandth."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Turns:
    """How often each source comes in a turn, in order of the sources."""

    counts: tuple[int, ...]

    @cached_property
    def sources(self) -> Ints:
        """sources_C: the source of each place of a turn."""
        counts = np.array(self.counts)
        given, found = np.zeros_like(counts), np.empty(counts.sum(), dtype=np.int64)
        for place in range(len(found)):
            is_behind = counts * (place + 1) > given * len(found)
            found[place] = np.argmin(np.where(is_behind, (given + 1) / counts, np.inf))
            given[found[place]] += 1
        return found

    @cached_property
    def ranks(self) -> Ints:
        """ranks_C: how many places of the same source stand before each place of a turn."""
        found = np.empty_like(self.sources)
        for source in range(len(self.counts)):
            mine = self.sources == source
            found[mine] = np.arange(mine.sum())
        return found

    def at(self, places: Ints) -> tuple[Ints, Ints]:
        """The source of each of these samples of the run, and the place within that source's own walk."""
        turns, inside = np.divmod(places, len(self.sources))
        sources = self.sources[inside]
        return sources, turns * np.array(self.counts)[sources] + self.ranks[inside]

    @property
    def shares(self) -> tuple[float, ...]:
        """Exact share of each source."""
        return tuple(count / sum(self.counts) for count in self.counts)


def turns_of(weights: Sequence[float]) -> Turns:
    """Weights as places of a turn: rounded down, and the places left to the largest remainders.

    Raises:
        DataError: a source that would have no place.
    """
    shares = [weight / sum(weights) * CYCLE for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: (counts[source] - shares[source], source))
    for source in by_remainder[: CYCLE - sum(counts)]:
        counts[source] += 1
    if 0 in counts:
        got = f"{weights[counts.index(0)]:g} of {sum(weights):g}"
        raise DataError(Fault(KEY, "a weight is too small to be kept", got, f"at least 1/{CYCLE} of the sum"))
    return Turns(tuple(counts))


def read_mix(words: Sequence[str]) -> Mapping[str, float]:
    """`"a=0.7" "b=0.3"` as sources with their weights.

    Raises:
        DataError: with every word that is no such pair.
    """
    faults, found = [], dict[str, float]()
    for word in words:
        source, equals, text = word.rpartition("=")
        weight = _number(text)
        if not equals or not source:
            faults.append(Fault(KEY, "names no weight", repr(word), "SOURCE=WEIGHT", f'for example "{word}=0.5"'))
        elif weight is None or not 0 < weight < math.inf:
            need = "a number above 0"
            faults.append(Fault(KEY, f"the weight of {source} cannot be used", repr(text), need, f'"{source}=0.5"'))
        elif source in found:
            faults.append(Fault(KEY, "names a source twice", repr(source), "each once", "add its weights"))
        else:
            found[source] = weight
    if faults:
        raise DataError(*faults)
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
