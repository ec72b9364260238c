"""Comparison of a layout with itself, to the last bit: replicas, parameters as used, entries that no rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.prove.bounds import largest_difference
from weft.prove.found_differences import FoundDifferences, PhaseStats
from weft.prove.localise import Failure, key_of
from weft.prove.places import FlatPlace, Whole
from weft.prove.record import Observed, Site


@dataclass(frozen=True)
class OwnState:
    """Compares updated parameters of all ranks with each other.

    Args:
        found: where differences are added.
    """

    found: FoundDifferences

    def compare_coverage(self) -> None:
        """Every entry of every parameter lies on some rank."""
        held: dict[str, set[object]] = {}
        sizes: dict[str, int] = {}
        for record in self.found.records:
            for param in record.shards.values():
                shards = held.setdefault(param.owner, set())
                if param.shard not in shards:
                    shards.add(param.shard)
                    sizes[param.owner] = sizes.get(param.owner, 0) + param.shard.size
        for key, whole in self.found.bounds.plain.values.items():
            if key.phase != "update" or key.step != 1 or key.tensor == "learning rate":
                continue
            stats = self.found.stats.setdefault("forward", PhaseStats())
            stats.add(0.0, 1.0)
            if sizes.get(key.tensor, 0) != whole.numel():
                block = key.tensor.partition(".")[0]
                site = Site(1, "forward", block, f"{key.tensor} as used", key.tensor)
                observed = Observed(torch.zeros(0), Whole(), None)
                failure = Failure(0, observed, whole, math.inf, 0.0)
                self.found.failures.setdefault(site, {})[0] = failure

    def compare(self) -> None:
        """Replicas of a parameter are bit-equal, and the next step uses the updated values, rounded
        once. In 16 bits the bounds of these tensors are wider than an update.
        """
        states: dict[tuple[int, str], Tensor] = {}
        for record in self.found.records:
            for site, observed in record.values.items():
                if site.phase == "update":
                    self._join(states, record.rank, site, observed)
        for record in self.found.records:
            for site, observed in record.values.items():
                state = states.get((site.step - 1, site.parameter))
                if state is not None and site.tensor.endswith(" as used"):
                    self._check_use(record.rank, site, observed, state)

    def _join(
        self,
        states: dict[tuple[int, str], Tensor],
        rank: int,
        site: Site,
        observed: Observed,
    ) -> None:
        """Write the entries of a rank into the logical tensor; those of a replica must be there."""
        assert isinstance(observed.place, FlatPlace), "updated values are recorded flat"
        shape = self.found.bounds.plain.values[key_of(site)].shape
        key = (site.step, site.parameter)
        if key not in states:
            states[key] = torch.full(shape, torch.nan, dtype=observed.value.dtype)
        whole = states[key]
        offset = 0
        for box in observed.place.boxes:
            entries = observed.value[offset : offset + box.size].view(box.shape)
            offset += box.size
            before = whole[box.slices].clone()
            whole[box.slices] = entries
            differs = ~torch.isnan(before) & (before != entries)
            if bool(differs.any()):
                relative = largest_difference(entries[differs], before[differs])
                relative /= self.found.bounds.scale(key_of(site))
                expected = observed.place.read(self.found.bounds.plain.values[key_of(site)])
                assert expected is not None, "the boxes lie in the parameter"
                self.found.fail(site, Failure(rank, observed, expected, relative, 0.0))

    def _check_use(self, rank: int, site: Site, observed: Observed, state: Tensor) -> None:
        local = observed.place.read(state)
        if local is None or bool(torch.isnan(local).any()):
            return
        expected = local.to(observed.value.dtype)
        if torch.equal(expected, observed.value):
            return
        relative = largest_difference(observed.value, expected)
        relative /= self.found.bounds.scale(key_of(site))
        self.found.fail(site, Failure(rank, observed, expected, relative, 0.0))
