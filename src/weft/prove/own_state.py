"""Comparison of a layout with itself, to the last bit: replicas, parameters as used, entries that no rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.shard import Shard
from weft.prove.found_differences import FoundDifferences, PhaseStats
from weft.prove.localise import Failure, key_of
from weft.prove.places import FlatPlace, Whole
from weft.prove.record import Observed, Site


class _Updated(NamedTuple):
    step: int
    parameter: str


@dataclass(frozen=True)
class OwnState:
    """Compares updated parameters of all ranks with each other.

    Args:
        found: where differences are added.
    """

    found: FoundDifferences

    def compare_coverage(self) -> None:
        """Every entry of every parameter lies on some rank."""
        sizes = self._held_entries()
        for key, whole in self.found.reference.items():
            if key.phase != "update" or key.step != 1 or key.tensor == "learning rate":
                continue
            stats = self.found.stats.setdefault("forward", PhaseStats())
            stats.add(0.0, 1.0)
            if sizes.get(key.tensor, 0) == whole.numel():
                continue
            site = Site.of_parameter(1, "forward", key.tensor, f"{key.tensor} as used")
            nothing = Observed(torch.zeros(0), Whole(), None)
            failures = self.found.failures.setdefault(site, {})
            failures[0] = Failure(0, nothing, whole, measured=math.inf, bound=0.0)

    def _held_entries(self) -> dict[str, int]:
        """Number of entries of each parameter that some rank holds; replicas count once."""
        shards: dict[str, set[Shard]] = {}
        for record in self.found.records:
            for param in record.shards.values():
                shards.setdefault(param.owner, set()).add(param.shard)
        sizes = {}
        for owner, distinct in shards.items():
            sizes[owner] = sum(shard.size for shard in distinct)
        return sizes

    def compare(self) -> None:
        """Replicas of a parameter are bit-equal, and the next step uses the updated values, rounded
        once. In 16 bits the bounds of these tensors are wider than an update.
        """
        states: dict[_Updated, Tensor] = {}
        for record in self.found.records:
            for site, observed in record.values.items():
                if site.phase == "update":
                    self._join(states, record.rank, site, observed)
        for record in self.found.records:
            for site, observed in record.values.items():
                if not site.tensor.endswith(" as used"):
                    continue
                state = states.get(_Updated(site.step - 1, site.parameter))
                if state is not None:
                    self._check_use(record.rank, site, observed, state)

    def _join(
        self, states: dict[_Updated, Tensor], rank: int, site: Site, observed: Observed
    ) -> None:
        """Write the entries of a rank into the logical tensor; those of a replica must be there."""
        assert isinstance(observed.place, FlatPlace), "updated values are recorded flat"
        right = self.found.reference[key_of(site)]
        key = _Updated(site.step, site.parameter)
        if key not in states:
            states[key] = _unknown_entries(right, observed.value.dtype)
        whole = states[key]
        offset = 0
        for box in observed.place.boxes:
            end = offset + box.size
            entries = observed.value[offset:end].view(box.shape)
            offset = end
            of_replica = whole[box.slices].clone()
            whole[box.slices] = entries
            is_known = ~torch.isnan(of_replica)
            differs = is_known & (of_replica != entries)
            if not bool(differs.any()):
                continue
            expected = observed.place.read(right)
            assert expected is not None, "the boxes lie in the parameter"
            relative = self._relative(site, entries[differs], of_replica[differs])
            failure = Failure(rank, observed, expected, relative, bound=0.0)
            self.found.fail(site, failure)

    def _check_use(self, rank: int, site: Site, observed: Observed, state: Tensor) -> None:
        local = observed.place.read(state)
        if local is None or bool(torch.isnan(local).any()):
            return
        expected = local.to(observed.value.dtype)
        if torch.equal(expected, observed.value):
            return
        relative = self._relative(site, observed.value, expected)
        self.found.fail(site, Failure(rank, observed, expected, relative, bound=0.0))

    def _relative(self, site: Site, actual: Tensor, expected: Tensor) -> float:
        return self.found.bounds.relative(actual, expected, key_of(site))


def _unknown_entries(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape, of NaN: its entries are not known yet. Counts become float64."""
    dtype = dtype if dtype.is_floating_point else torch.float64
    return torch.full(like.shape, torch.nan, dtype=dtype)
