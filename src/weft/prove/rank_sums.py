"""Comparison of sums over ranks with one device: gradients before their reduction, losses of blocks, loads of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.dimension import activation_axes, pipeline_axis, replicated_axes, token_axes
from weft.parallel.model.parallelize import ParamShard
from weft.prove.found_differences import FoundDifferences
from weft.prove.gradient_sums import GradientSums
from weft.prove.places import ShardPlace, Whole
from weft.prove.record import Observed, PartialGradient, Site
from weft.prove.reference_trace import TensorKey

EXTRA_LOSS = "extra loss"
Coordinates = tuple[tuple[str, int], ...]
"""Mesh axes with the index of a rank along each."""


@dataclass(frozen=True)
class RankSums:
    """Compares what adds up over ranks.

    Args:
        found: where differences are added.
        gradients: of all ranks before their reduction.
        has_sharded_activations: whether sequence parallelism makes gradients of replicated
            parameters parts of a sum.
    """

    found: FoundDifferences
    gradients: GradientSums
    has_sharded_activations: bool = False

    def compare(self) -> None:
        """Compare all sums."""
        self._compare_partial_gradients()
        self._compare_sums()
        self._compare_loads()

    def _compare_partial_gradients(self) -> None:
        """Before their reduction the gradients of all ranks must add up to the right one."""
        groups: dict[tuple[int, str, Coordinates], list[tuple[int, PartialGradient]]] = {}
        for record in self.found.records:
            for (step, _), partial in record.partial_gradients.items():
                owner = partial.param.owner
                others = self._coordinates(record.rank, partial.param.reduce_axes)
                key = (step, owner, others)
                groups.setdefault(key, []).append((record.rank, partial))
        for (step, owner, _), members in groups.items():
            self._compare_partial_group(step, owner, members)

    def _coordinates(self, rank: int, summed: Sequence[str]) -> Coordinates:
        """Coordinates along the axes that are not summed; stages that share a parameter are."""
        left_out = (*summed, pipeline_axis())
        found = []
        for axis, index in self.found.mesh.coord(rank).items():
            if axis not in left_out:
                found.append((axis, index))
        return tuple(found)

    def _compare_partial_group(
        self, step: int, owner: str, members: Sequence[tuple[int, PartialGradient]]
    ) -> None:
        block = owner.partition(".")[0]
        site = Site(step, "backward", block, f"{owner} gradient", owner)
        key = TensorKey(step, "backward", f"{owner} gradient")
        whole = self.found.bounds.plain.values.get(key)
        if whole is None or self.found.is_skipped(site):
            return
        total = torch.stack([partial.value for _, partial in members]).sum(0)
        for rank, partial in members:
            place = ShardPlace(partial.param.shard)
            expected = place.read(whole)
            assert expected is not None, "a shard lies in its parameter"
            is_wrong = self.found.bounds.relative(total, expected, key) > self.found.bounds.bound(
                key
            )
            if is_wrong and self._has_right_terms(step, partial.param, rank):
                continue  # their reduction is compared after it
            observed = Observed(total, place, partial.operation)
            self.found.check(site, rank, observed, expected, key)

    def _has_right_terms(self, step: int, param: ParamShard, rank: int) -> bool:
        """Whether the ranks' own gradients add up to the right one over axes over which gradients
        of this parameter may be summed. Over others every rank must have all of it.
        """
        right = self.gradients.right_axes(step, param.name, rank)
        summed = {*token_axes(), *param.reduce_axes}
        if self.has_sharded_activations:
            summed.update(activation_axes())
        return right is not None and summed.issuperset(right)

    def _compare_sums(self) -> None:
        """Losses of each block, summed over the ranks with different tokens."""
        totals: dict[tuple[int, str, str, Coordinates], float] = {}
        ranks: dict[tuple[int, str, str, Coordinates], list[int]] = {}
        for record in self.found.records:
            for (step, block, name), value in record.sums.items():
                if name == EXTRA_LOSS and self._is_copy(record.rank):
                    continue  # a balance loss counts on the first copy alone
                group = (step, block, name, self._coordinates(record.rank, token_axes()))
                totals[group] = totals.get(group, 0.0) + value
                ranks.setdefault(group, []).append(record.rank)
        for group, total in totals.items():
            step, block, name, _ = group
            site = Site(step, "loss", block, f"{block}.{name}")
            for rank in ranks[group]:
                self.found.number(self.found.records[rank], site, total)

    def _is_copy(self, rank: int) -> bool:
        """Whether another rank computes the loss of the same tokens and counts before this one."""
        coord = self.found.mesh.coord(rank)
        return any(coord.get(axis, 0) > 0 for axis in replicated_axes())

    def _compare_loads(self) -> None:
        """Tokens at each expert, summed over the ranks with different tokens; exact in float64."""
        totals: dict[tuple[int, str, Coordinates], Tensor] = {}
        ranks: dict[tuple[int, str, Coordinates], list[int]] = {}
        for record in self.found.records:
            for (step, block), load in record.loads.items():
                group = (step, block, self._coordinates(record.rank, token_axes()))
                totals[group] = totals.get(group, torch.zeros_like(load)) + load
                ranks.setdefault(group, []).append(record.rank)
        for group, total in totals.items():
            step, block, _ = group
            site = Site(step, "forward", block, f"{block}.expert load")
            key = TensorKey(step, "forward", site.tensor)
            whole = self.found.bounds.plain.values.get(key)
            if whole is None:
                continue
            for rank in ranks[group]:
                observed = Observed(total, Whole(), None)
                self.found.check(site, rank, observed, whole, key)
