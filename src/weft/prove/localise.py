"""Differences from failed comparisons: their order of execution, block, mesh axis and numeric relation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.comm.observe import Operation
from weft.core.mesh import Mesh
from weft.prove.bounds import Bounds, largest_difference
from weft.prove.gradient_sums import GradientSums
from weft.prove.record import Observed, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.relations import relation
from weft.prove.report import PHASES, Difference
from weft.prove.stored import SUFFIX

MAX_RELATIONS = 8
"""Differences whose numeric relation is looked for."""


@dataclass(frozen=True)
class Failure:
    """A tensor of one rank beyond its bound, or of another number type than it must have.

    Attributes:
        text: what is wrong; "": its numbers say it.
    """

    rank: int
    observed: Observed
    expected: Tensor
    measured: float
    bound: float
    text: str = ""


def key_of(site: Site) -> TensorKey:
    """The reference's name of a tensor; restored state is that after the step."""
    phase = site.phase
    tensor = "documents" if site.tensor == "whole_documents" else site.tensor
    if phase == "checkpoint":
        tensor = tensor.removesuffix(SUFFIX)
        phase = "update" if tensor == site.parameter else "moments"
    return TensorKey(site.step, phase, tensor)


@dataclass(frozen=True)
class Localisation:
    """What is known of the failed comparisons of one run.

    Attributes:
        failures: tensors beyond their bounds, by what they are and by rank.
        sums: the gradients of all ranks before their reduction.
    """

    mesh: Mesh
    records: Sequence[RankRecord]
    bounds: Bounds
    failures: Mapping[Site, Mapping[int, Failure]]
    sums: GradientSums

    def differences(self) -> tuple[Difference, ...]:
        """All differences, in the order of execution."""
        found = []
        for place, site in enumerate(sorted(self.failures, key=self.order)):
            found.append(self._difference(site, has_relation=place < MAX_RELATIONS))
        return tuple(found)

    def order(self, site: Site) -> tuple[float, ...]:
        """Sort key of the order of execution."""
        blocks = self.bounds.plain.blocks
        position = blocks.index(site.block) if site.block in blocks else len(blocks)
        phase = PHASES.index(site.phase)
        micro_batch = -1 if site.micro_batch is None else site.micro_batch
        if site.phase == "batch" and site.micro_batch is None:
            return site.step, phase, len(blocks) + 1, 0, 0  # numbers that follow from the fields
        if site.phase == "evaluation":
            phase = len(PHASES) + 1
        if site.phase == "checkpoint":
            phase = len(PHASES)
        if site.phase in ("backward", "reduce", "clip", "moments", "update"):
            if site.phase == "backward" and site.micro_batch is not None:
                position += 1  # the gradient of an output is computed by the block after it
                return site.step, phase, -position, 1, micro_batch
            is_number = site.block == ""
            return site.step, phase, -len(blocks) - 1 if is_number else -position, 0, micro_batch
        if site.phase == "loss":
            return site.step, phase, position, 0, micro_batch
        if site.phase == "forward" and site.tensor.endswith(".expert load"):
            micro_batch = self._num_micro_batches  # a sum over all of them
        return site.step, phase, micro_batch, position, 0

    @cached_property
    def _num_micro_batches(self) -> int:
        numbers = [site.micro_batch or 0 for site in self.failures]
        return 1 + max(numbers, default=0)

    def _difference(self, site: Site, *, has_relation: bool) -> Difference:
        failures = self.failures[site]
        worst = max(failures.values(), key=lambda failure: failure.measured)
        first = failures[min(failures)]
        axis, text = "", "other values"
        if has_relation:
            axis, text = self._explain(site, first)
        operation = first.observed.operation
        name, block = self._names(site)
        return Difference(
            tensor=name,
            block=block,
            parameter=site.parameter,
            phase=site.phase,
            step=site.step,
            micro_batch=site.micro_batch,
            axis=axis,
            ranks=tuple(sorted(failures)),
            collective="" if operation is None else _operation_text(operation),
            relation=text,
            measured=worst.measured,
            bound=worst.bound,
        )

    def _names(self, site: Site) -> tuple[str, str]:
        """Tensor and block; the gradient of an output is the input gradient of the next block."""
        blocks = self.bounds.plain.blocks
        if site.phase != "backward" or site.micro_batch is None or site.block not in blocks:
            return site.tensor, site.block
        following = blocks.index(site.block) + 1
        if following == len(blocks):
            return site.tensor, site.block
        block = blocks[following]
        return f"{block}.input gradient", block

    def _explain(self, site: Site, failure: Failure) -> tuple[str, str]:
        """Mesh axis and numeric relation."""
        if failure.text:
            return self._axis(site, failure), failure.text
        measured, expected = failure.observed.value, failure.expected
        if failure.measured == math.inf and measured.numel() == 0:
            return "", "held by no rank in full"
        if site.phase in ("reduce", "clip"):
            for axes, phrase in self._partial_sums(site, failure):
                if largest_difference(measured, phrase.value) <= _close(phrase.value, expected):
                    return axes, phrase.text
        text = relation(
            measured,
            expected,
            candidates=self._candidates(site, failure),
            before=self._before(site, failure),
        )
        return self._axis(site, failure), text

    def _axis(self, site: Site, failure: Failure) -> str:
        """The mesh axis that the difference follows; "" where none does."""
        failed = self.failures[site]
        holders = [record.rank for record in self.records if self._holds(record, site)]
        followed = self._separating_axis(sorted(failed), holders)
        if followed:
            return followed
        disagreeing = self._disagreeing_axis(site, holders)
        if disagreeing:
            return disagreeing
        operation = failure.observed.operation
        wide = self.mesh.wide_axes
        if len(wide) == 1:
            return wide[0]
        if operation is not None and all(name in wide for name in operation.axis.split("+")):
            return operation.axis
        return ""

    def _holds(self, record: RankRecord, site: Site) -> bool:
        if site in record.values or not site.block:
            return True
        if site.phase == "backward":
            found = record.partial_gradients
            return any(
                step == site.step and partial.param.owner == site.parameter
                for (step, _), partial in found.items()
            )
        return (site.step, site.block) in record.loads or any(
            (step, block) == (site.step, site.block) for step, block, _ in record.sums
        )

    def _separating_axis(self, failed: Sequence[int], holders: Sequence[int]) -> str:
        """The axis whose coordinate alone tells wrong ranks from right ones."""
        if len(failed) == len(holders):
            return ""
        for axis in self.mesh.wide_axes:
            wrong = {self.mesh.coord(rank)[axis] for rank in failed}
            right = {self.mesh.coord(rank)[axis] for rank in holders if rank not in failed}
            if wrong.isdisjoint(right):
                return axis
        return ""

    def _disagreeing_axis(self, site: Site, holders: Sequence[int]) -> str:
        """The axis along which ranks that should hold the same entries hold different ones."""
        for axis in reversed(self.mesh.wide_axes):
            for rank in holders:
                own = self.records[rank].values.get(site)
                if own is None:
                    continue
                for other_rank in self.mesh.group(rank, axis):
                    other = self.records[other_rank].values.get(site)
                    if other is None or other.place != own.place:
                        continue
                    if own.value.shape != other.value.shape:
                        return axis
                    key = key_of(site)
                    difference = largest_difference(own.value, other.value)
                    if difference > self.bounds.bound(key) * self.bounds.scale(key):
                        return axis
        return ""

    def _partial_sums(self, site: Site, failure: Failure) -> Iterator[tuple[str, _Phrase]]:
        """Sums of the ranks' own gradients over other axes than the right ones."""
        record = self.records[failure.rank]
        name = next(
            (name for name, param in record.shards.items() if param.owner == site.parameter), None
        )
        if name is None or (site.step, name) not in record.partial_gradients:
            return
        right = self.sums.right_axes(site.step, name, failure.rank)
        if right is None:
            return
        for axes in self.sums.axis_sets():
            total = self.sums.sum_over(site.step, name, failure.rank, axes)
            if total is None or set(axes) == set(right):
                continue
            local = _local_entries(total, failure.observed, record, name)
            if local is not None:
                yield self._wrong_sum(right, axes, local)

    def _wrong_sum(
        self, right: tuple[str, ...], axes: tuple[str, ...], value: Tensor
    ) -> tuple[str, _Phrase]:
        """Axis and words of a sum over `axes` in place of `right`."""
        missing = [axis for axis in self.mesh.wide_axes if axis in right and axis not in axes]
        extra = [axis for axis in self.mesh.wide_axes if axis in axes and axis not in right]
        words = []
        if missing:
            words.append(
                f"not summed over {' and '.join(missing)} (terms of other ranks are missing)"
            )
        if extra:
            words.append(f"summed over {' and '.join(extra)} by mistake")
        return "+".join(missing or extra), _Phrase(", ".join(words), value)

    def _candidates(self, site: Site, failure: Failure) -> dict[str, Tensor]:
        """Tensors that the measured one may be by mistake."""
        found: dict[str, Tensor] = {}
        values = self.bounds.plain.values
        key = key_of(site)
        whole = values.get(key)
        earlier = values.get(key._replace(step=site.step - 1))
        place = failure.observed.place
        if earlier is not None and earlier.dim():
            stale = place.read(earlier)
            if stale is not None:
                text = f"the value of step {site.step - 1} (stale)"
                found[text] = stale.reshape(failure.expected.shape)
        if whole is None:
            return found
        if site.phase == "clip":
            unclipped = values.get(TensorKey(site.step, "reduce", f"{site.parameter} gradient"))
            if unclipped is not None:
                local = place.read(unclipped)
                if local is not None:
                    found["not clipped"] = local
        for record in self.records:
            other = record.values.get(site)
            if other is None or other.place == place or record.rank == failure.rank:
                continue
            shard = other.place.read(whole)
            if shard is not None and shard.shape == failure.expected.shape:
                where = self.mesh.coord_text(record.rank)
                found[f"the shard of rank {record.rank} ({where}), repeated"] = shard
        return found

    def _before(self, site: Site, failure: Failure) -> Tensor | None:
        if site.phase != "update" or not site.parameter:
            return None
        used = self.bounds.plain.values.get(
            TensorKey(site.step, "forward", f"{site.parameter} as used")
        )
        return None if used is None else failure.observed.place.read(used)


@dataclass(frozen=True)
class _Phrase:
    text: str
    value: Tensor


def _close(value: Tensor, expected: Tensor) -> float:
    """Difference within which a value counts as a wrong sum."""
    size = max(float(value.abs().max()), float(expected.abs().max())) if value.numel() else 0.0
    return 1e-3 * size


def _local_entries(
    total: Tensor, observed: Observed, record: RankRecord, name: str
) -> Tensor | None:
    """The entries of a local gradient that an observed tensor holds."""
    shard = record.shards[name].shard
    whole = torch.zeros(record.shards[name].shape, dtype=total.dtype)
    offset = 0
    for box in shard.boxes:
        part = total
        if len(shard.boxes) > 1:
            length = box.shape[shard.dim]
            part = total.narrow(shard.dim, offset, length)
            offset += length
        whole[box.slices] = part
    entries = observed.place.read(whole)
    return None if entries is None else entries.reshape(observed.value.shape)


def _operation_text(operation: Operation) -> str:
    ranks = " ".join(map(str, operation.group))
    return f"{operation.op} over {operation.axis}, ranks {ranks}"
