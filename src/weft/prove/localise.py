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
from weft.parallel.model.parallelize import ParamShard
from weft.prove.bounds import Bounds, largest_difference
from weft.prove.gradient_sums import GradientSums
from weft.prove.record import BlockLoad, Observed, RankRecord, Site
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
        sites = sorted(self.failures, key=self.order)
        found = []
        for place, site in enumerate(sites):
            has_relation = place < MAX_RELATIONS
            found.append(self._difference(site, has_relation=has_relation))
        return tuple(found)

    def order(self, site: Site) -> tuple[float, ...]:
        """Sort key of the order of execution; parameters of a block as its forward uses them, or in
        the reverse order.
        """
        place = self._places.get(site.parameter, 0)
        in_blocks = execution_order(
            site, self.bounds.plain.blocks, num_micro_batches=self._num_micro_batches
        )
        return (*in_blocks, place if site.phase == "forward" else -place)

    @cached_property
    def _places(self) -> dict[str, int]:
        """The place of each parameter among those of a rank."""
        places: dict[str, int] = {}
        for record in self.records:
            for place, param in enumerate(record.shards.values()):
                places.setdefault(param.owner, place)
        return places

    @cached_property
    def _num_micro_batches(self) -> int:
        largest = 0
        for site in self.failures:
            if site.micro_batch is not None:
                largest = max(largest, site.micro_batch)
        return largest + 1

    def _difference(self, site: Site, *, has_relation: bool) -> Difference:
        failures = self.failures[site]
        ranks = tuple(sorted(failures))
        first = failures[ranks[0]]
        worst = max(failures.values(), key=lambda failure: failure.measured)
        cause = _Cause("", "different")
        if has_relation:
            cause = self._explain(site, first)
        operation = first.observed.operation
        name, block = self._names(site)
        return Difference(
            tensor=name,
            block=block,
            parameter=site.parameter,
            phase=site.phase,
            step=site.step,
            micro_batch=site.micro_batch,
            axis=cause.axis,
            ranks=ranks,
            collective="" if operation is None else _operation_text(operation),
            relation=cause.text,
            measured=worst.measured,
            bound=worst.bound,
        )

    def _names(self, site: Site) -> tuple[str, str]:
        """Tensor and block; the gradient of an output is the input gradient of the next block."""
        blocks = self.bounds.plain.blocks
        is_gradient = site.phase == "backward" and site.micro_batch is not None
        if not is_gradient or site.block not in blocks:
            return site.tensor, site.block
        place = blocks.index(site.block)
        following = blocks[place + 1 :]
        if not following:
            return site.tensor, site.block
        block = following[0]
        return f"{block}.input gradient", block

    def _explain(self, site: Site, failure: Failure) -> _Cause:
        """Mesh axis and numeric relation."""
        if failure.text:
            return _Cause(self._axis(site, failure), failure.text)
        measured = failure.observed.value
        expected = failure.expected
        if failure.measured == math.inf and measured.numel() == 0:
            return _Cause("", "held by no rank in full")
        if site.phase in ("reduce", "clip"):
            for wrong in self._wrong_sums(site, failure):
                difference = largest_difference(measured, wrong.value)
                if difference <= _close(wrong.value, expected):
                    return wrong.cause
        text = relation(
            measured,
            expected,
            candidates=self._candidates(site, failure),
            before=self._before(site, failure),
        )
        return _Cause(self._axis(site, failure), text)

    def _axis(self, site: Site, failure: Failure) -> str:
        """The mesh axis that the difference follows; "" where none does."""
        failed = sorted(self.failures[site])
        holders = [record.rank for record in self.records if _holds(record, site)]
        followed = self._separating_axis(failed, holders)
        if followed:
            return followed
        disagreeing = self._disagreeing_axis(site, holders)
        if disagreeing:
            return disagreeing
        wide_axes = self.mesh.wide_axes
        if len(wide_axes) == 1:
            return wide_axes[0]
        operation = failure.observed.operation
        if operation is None:
            return ""
        names = operation.axis.split("+")
        return operation.axis if set(names).issubset(wide_axes) else ""

    def _separating_axis(self, failed: Sequence[int], holders: Sequence[int]) -> str:
        """The axis whose coordinate alone tells wrong ranks from right ones."""
        if len(failed) == len(holders):
            return ""
        for axis in self.mesh.wide_axes:
            wrong: set[int] = set()
            right: set[int] = set()
            for rank in failed:
                wrong.add(self.mesh.coord(rank)[axis])
            for rank in holders:
                if rank not in failed:
                    right.add(self.mesh.coord(rank)[axis])
            if wrong.isdisjoint(right):
                return axis
        return ""

    def _disagreeing_axis(self, site: Site, holders: Sequence[int]) -> str:
        """The axis along which ranks that should hold the same entries hold different ones."""
        for axis in reversed(self.mesh.wide_axes):
            for rank in holders:
                own = self.records[rank].values.get(site)
                if own is not None and self._differs_along(axis, rank, site, own):
                    return axis
        return ""

    def _differs_along(self, axis: str, rank: int, site: Site, own: Observed) -> bool:
        """Whether another rank along the axis holds other values of the same entries."""
        key = key_of(site)
        for other_rank in self.mesh.group(rank, axis):
            other = self.records[other_rank].values.get(site)
            if other is None or other.place != own.place:
                continue
            if own.value.shape != other.value.shape:
                return True
            difference = largest_difference(own.value, other.value)
            if difference > self.bounds.bound(key) * self.bounds.scale(key):
                return True
        return False

    def _wrong_sums(self, site: Site, failure: Failure) -> Iterator[_WrongSum]:
        """Sums of the ranks' own gradients over other axes than the right ones."""
        record = self.records[failure.rank]
        name = _local_name(record, site.parameter)
        if name is None or (site.step, name) not in record.partial_gradients:
            return
        right = self.sums.right_axes(site.step, name, failure.rank)
        if right is None:
            return
        for axes in self.sums.axis_sets():
            if set(axes) == set(right):
                continue
            total = self.sums.sum_over(site.step, name, failure.rank, axes)
            if total is None:
                continue
            local = _local_entries(total, failure.observed, record.shards[name])
            if local is not None:
                yield _WrongSum(self._cause_of_sum(right, axes), local)

    def _cause_of_sum(self, right: tuple[str, ...], axes: tuple[str, ...]) -> _Cause:
        """Axis and words of a sum over `axes` in place of `right`."""
        missing = []
        extra = []
        for axis in self.mesh.wide_axes:
            if axis in right and axis not in axes:
                missing.append(axis)
            if axis in axes and axis not in right:
                extra.append(axis)
        words = []
        if missing:
            names = " and ".join(missing)
            words.append(f"not summed over {names} (terms of other ranks are missing)")
        if extra:
            names = " and ".join(extra)
            words.append(f"summed over {names} by mistake")
        return _Cause("+".join(missing or extra), ", ".join(words))

    def _candidates(self, site: Site, failure: Failure) -> dict[str, Tensor]:
        """Tensors that the measured one may be by mistake, by their description."""
        found: dict[str, Tensor] = {}
        key = key_of(site)
        step_before = site.step - 1
        stale = self._entries(key._replace(step=step_before), failure)
        if stale is not None and failure.expected.dim():
            text = f"the value of step {step_before} (stale)"
            found[text] = stale.reshape(failure.expected.shape)
        if site.phase == "clip":
            gradient = TensorKey.of_gradient(site.step, "reduce", site.parameter)
            unclipped = self._entries(gradient, failure)
            if unclipped is not None:
                found["not clipped"] = unclipped
        whole = self.bounds.plain.values.get(key)
        if whole is not None:
            found.update(self._other_shards(site, failure, whole))
        return found

    def _other_shards(self, site: Site, failure: Failure, whole: Tensor) -> dict[str, Tensor]:
        """What other ranks hold of the tensor, where it has the same shape."""
        found: dict[str, Tensor] = {}
        for record in self.records:
            other = record.values.get(site)
            if other is None or other.place == failure.observed.place:
                continue
            shard = other.place.read(whole)
            if shard is None or shard.shape != failure.expected.shape:
                continue
            where = self.mesh.coord_text(record.rank)
            found[f"the shard of rank {record.rank} ({where}), repeated"] = shard
        return found

    def _entries(self, key: TensorKey, failure: Failure) -> Tensor | None:
        """The entries of another tensor of the reference at the place of the failure."""
        whole = self.bounds.plain.values.get(key)
        return None if whole is None else failure.observed.place.read(whole)

    def _before(self, site: Site, failure: Failure) -> Tensor | None:
        """The value of an updated parameter before its update."""
        if site.phase != "update" or not site.parameter:
            return None
        return self._entries(TensorKey.as_used(site.step, site.parameter), failure)


@dataclass(frozen=True)
class _Cause:
    """Mesh axis that a difference follows, and how the tensor relates to the right one."""

    axis: str
    text: str


@dataclass(frozen=True)
class _WrongSum:
    cause: _Cause
    value: Tensor


def execution_order(
    site: Site, blocks: Sequence[str], *, num_micro_batches: int
) -> tuple[float, ...]:
    """Sort key of the order of execution: step, phase, then block and micro-batch as the phase runs
    them.

    Args:
        blocks: names of all blocks, in their order.
        num_micro_batches: of a step.
    """
    position = len(blocks)
    if site.block in blocks:
        position = blocks.index(site.block)
    micro_batch = -1 if site.micro_batch is None else site.micro_batch
    phase = PHASES.index(site.phase)
    match site.phase:
        case "batch" if site.micro_batch is None:  # numbers that follow from the fields
            return site.step, phase, len(blocks) + 1, 0, 0
        case "backward" if site.micro_batch is not None:
            following = position + 1  # computes the gradient of the output
            return site.step, phase, -following, 1, micro_batch
        case "backward" | "reduce" | "clip" | "moments" | "update":
            is_number = site.block == ""
            place = -len(blocks) - 1 if is_number else -position
            return site.step, phase, place, 0, micro_batch
        case "loss":
            return site.step, phase, position, 0, micro_batch
        case "checkpoint":
            phase = len(PHASES)
        case "evaluation":
            phase = len(PHASES) + 1
        case "forward" if site.tensor.endswith(".expert load"):
            micro_batch = num_micro_batches  # a sum over all of them
    return site.step, phase, micro_batch, position, 0


def _holds(record: RankRecord, site: Site) -> bool:
    """Whether a rank computed a part of the tensor, or of the sum."""
    if site in record.values or not site.block:
        return True
    if site.phase == "backward":
        for (step, _), partial in record.partial_gradients.items():
            if step == site.step and partial.param.owner == site.parameter:
                return True
        return False
    if BlockLoad(site.step, site.block) in record.loads:
        return True
    blocks_of_step = {number.block for number in record.sums if number.step == site.step}
    return site.block in blocks_of_step


def _local_name(record: RankRecord, parameter: str) -> str | None:
    """The name under which a rank has a parameter, maybe one that is tied to it."""
    for name, param in record.shards.items():
        if param.owner == parameter:
            return name
    return None


def _close(value: Tensor, expected: Tensor) -> float:
    """Difference within which a value counts as a wrong sum."""
    if not value.numel():
        return 0.0
    largest_value = float(value.abs().max())
    largest_expected = float(expected.abs().max())
    return 1e-3 * max(largest_value, largest_expected)


def _local_entries(total: Tensor, observed: Observed, param: ParamShard) -> Tensor | None:
    """The entries of a local gradient that an observed tensor holds."""
    shard = param.shard
    whole = torch.zeros(param.shape, dtype=total.dtype)
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
