"""Comparison of sums over ranks with one device: gradients before their reduction, losses of blocks, loads of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from weft.core.dimension import activation_axes, pipeline_axis, replicated_axes, token_axes
from weft.parallel.model.parallelize import ParamShard
from weft.prove.bounds import FLOOR, MIN_SCALE, TOLERANCE
from weft.prove.found_differences import FoundDifferences
from weft.prove.gradient_sums import GradientSums
from weft.prove.localise import Failure
from weft.prove.places import ShardPlace, Whole
from weft.prove.record import Observed, PartialGradient, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.relations import dtype_text

EXTRA_LOSS = "extra loss"
Coordinates = tuple[tuple[str, int], ...]
"""Mesh axes with the index of a rank along each."""


class _Summed(NamedTuple):
    """What is added up: a number, load or gradient of one step, over ranks that agree along the
    other axes.
    """

    step: int
    name: str
    others: Coordinates
    block: str = ""

    @property
    def tensor(self) -> str:
        """The logical name of the tensor."""
        return f"{self.block}.{self.name}"


Term = TypeVar("Term", float, Tensor)


@dataclass
class _Sum(Generic[Term]):
    total: Term
    ranks: list[int] = field(default_factory=list)

    def add(self, rank: int, term: Term) -> None:
        self.total = self.total + term
        self.ranks.append(rank)


class _RankGradient(NamedTuple):
    rank: int
    partial: PartialGradient


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
        groups: dict[_Summed, list[_RankGradient]] = {}
        for record in self.found.records:
            for (step, _), partial in record.partial_gradients.items():
                others = self._coordinates(record.rank, partial.param.reduce_axes)
                key = _Summed(step, partial.param.owner, others)
                members = groups.setdefault(key, [])
                members.append(_RankGradient(record.rank, partial))
        for summed, members in groups.items():
            self._compare_partial_group(summed.step, summed.name, members)

    def _coordinates(self, rank: int, summed: Sequence[str]) -> Coordinates:
        """Coordinates along the axes that are not summed; stages that share a parameter are."""
        left_out = (*summed, pipeline_axis())
        coord = self.found.mesh.coord(rank)
        found = []
        for axis, index in coord.items():
            if axis not in left_out:
                found.append((axis, index))
        return tuple(found)

    def _compare_partial_group(
        self, step: int, owner: str, members: Sequence[_RankGradient]
    ) -> None:
        site = Site.of_parameter(step, "backward", owner, f"{owner} gradient")
        key = TensorKey.of_gradient(step, "backward", owner)
        whole = self.found.reference.get(key)
        if whole is None or self.found.is_skipped(site):
            return
        bounds = self.found.bounds
        bound = bounds.bound(key)
        parts = [member.partial.value for member in members]
        # In float64: the type and the order in which the layout adds them are compared after its reduction.
        total = torch.stack(parts).sum(0)
        for rank, partial in members:
            place = ShardPlace(partial.param.shard)
            expected = place.read(whole)
            assert expected is not None, "a shard lies in its parameter"
            is_wrong = bounds.relative(total, expected, key) > bound
            if is_wrong and self._has_right_terms(step, partial.param, rank):
                continue  # their reduction is compared after it
            observed = Observed(total, place, partial.operation)
            self.found.check(site, rank, observed, expected, key)

    def _has_right_terms(self, step: int, param: ParamShard, rank: int) -> bool:
        """Whether the ranks' own gradients add up to the right one over axes over which gradients
        of this parameter may be summed. Over others every rank must have all of it.
        """
        right_axes = self.gradients.right_axes(step, param.name, rank)
        if right_axes is None:
            return False
        summed = set(token_axes())
        summed.update(param.reduce_axes)
        if self.has_sharded_activations:
            summed.update(activation_axes())
        return summed.issuperset(right_axes)

    def _compare_sums(self) -> None:
        """Losses of each block, summed over the ranks with different tokens."""
        sums: dict[_Summed, _Sum[float]] = {}
        for record in self.found.records:
            coordinates = self._coordinates(record.rank, token_axes())
            for number, value in record.sums.items():
                if number.name == EXTRA_LOSS and self._is_copy(record.rank):
                    continue  # a balance loss counts on the first copy alone
                key = _Summed(number.step, number.name, coordinates, number.block)
                summed = sums.setdefault(key, _Sum(0.0))
                summed.add(record.rank, value)
        for key, summed in sums.items():
            site = Site(key.step, "loss", key.block, key.tensor)
            for rank in summed.ranks:
                self.found.number(self.found.records[rank], site, summed.total)
        self._compare_types()
        self._compare_logged()

    def _compare_types(self) -> None:
        """Losses must have the number types of one device: sums in a coarser type are within the
        bounds of 16 bits.
        """
        right_types = self.found.bounds.plain.types
        for record in self.found.records:
            for number, dtype in record.sum_types.items():
                site = Site(number.step, "loss", number.block, f"{number.block}.{number.name}")
                right = right_types.get(TensorKey(site.step, site.phase, site.tensor), dtype)
                if dtype != right:
                    text = f"in {dtype_text(dtype)} in place of {dtype_text(right)}"
                    self._fail_number(record, site, torch.finfo(dtype).eps, text=text)

    def _compare_logged(self) -> None:
        """The loss of a step must be the mean of what the ranks themselves have computed, to the
        rounding of losses, which have float32 at least.
        """
        widest = torch.promote_types(self.found.bounds.types.compute, torch.float32)
        bound = max(TOLERANCE, FLOOR * torch.finfo(widest).eps)
        totals: dict[int, float] = {}
        for record in self.found.records:
            for number, value in record.sums.items():
                if not self._is_copy(record.rank):
                    totals[number.step] = totals.get(number.step, 0.0) + value
        for record in self.found.records:
            for event in record.events:
                if event["event"] != "step" or event["step"] not in totals or not event["tokens"]:
                    continue
                step = int(event["step"])
                own_mean = totals[step] / event["tokens"]
                difference = abs(event["loss"] - own_mean) / max(abs(own_mean), MIN_SCALE)
                if difference > bound:
                    text = f"not the mean of the ranks' losses, {own_mean:.10g}"
                    site = Site.of_number(step, "loss", "loss")
                    self._fail_number(record, site, difference, text=text)

    def _fail_number(self, record: RankRecord, site: Site, measured: float, *, text: str) -> None:
        right = self.found.reference[TensorKey(site.step, site.phase, site.tensor)]
        observed = Observed(right, Whole(), None)
        failure = Failure(record.rank, observed, right, measured, bound=0.0, text=text)
        self.found.fail(site, failure)

    def _is_copy(self, rank: int) -> bool:
        """Whether another rank computes the loss of the same tokens and counts before this one."""
        coord = self.found.mesh.coord(rank)
        return any(coord.get(axis, 0) > 0 for axis in replicated_axes())

    def _compare_loads(self) -> None:
        """Tokens at each expert, summed over the ranks with different tokens; exact in float64."""
        sums: dict[_Summed, _Sum[Tensor]] = {}
        for record in self.found.records:
            coordinates = self._coordinates(record.rank, token_axes())
            for of_block, load in record.loads.items():
                key = _Summed(of_block.step, "expert load", coordinates, of_block.block)
                summed = sums.setdefault(key, _Sum(torch.zeros_like(load)))
                summed.add(record.rank, load)
        for key, summed in sums.items():
            site = Site(key.step, "forward", key.block, key.tensor)
            whole_key = TensorKey(key.step, "forward", key.tensor)
            whole = self.found.reference.get(whole_key)
            if whole is None:
                continue
            observed = Observed(summed.total, Whole(), None)
            for rank in summed.ranks:
                self.found.check(site, rank, observed, whole, whole_key)
