"""Compare the records of all ranks with the one-device reference, tensor by tensor, within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from weft.core.dimension import activation_axes, pipeline_axis, replicated_axes, token_axes
from weft.core.mesh import Mesh
from weft.parallel.model.parallelize import ParamShard
from weft.prove.bounds import Bounds, largest_difference
from weft.prove.gradient_sums import GradientSums
from weft.prove.localise import Failure, Localisation, key_of
from weft.prove.places import FlatPlace, ShardPlace, Whole
from weft.prove.record import Observed, PartialGradient, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.relations import dtype_text, rounded_to
from weft.prove.report import PHASES, Difference, Phase, PhaseBound
from weft.train.loop import Event

EXTRA_LOSS = "extra loss"
MOST_REROUTED = 0.05
"""Share of the tokens of a step that rounding may route otherwise, and the number below."""
MIN_REROUTED = 2.0
PHASE_OF_GRADIENTS: frozenset[Phase] = frozenset(
    ("backward", "reduce", "norm", "clip", "moments", "update")
)
Coordinates = tuple[tuple[str, int], ...]
"""Mesh axes with the index of a rank along each."""
STEP_NUMBERS: frozenset[Phase] = frozenset(("loss", "norm", "clip"))
"""Phases of numbers that every rank gets from one collective."""


@dataclass
class PhaseStats:
    """How close the tensors of a phase came to their bounds."""

    compared: int = 0
    largest: float = 0.0
    bound: float = 0.0
    closest: float = -1.0

    def add(self, relative: float, bound: float) -> None:
        """Count one tensor."""
        self.compared += 1
        ratio = relative / bound if bound else (0.0 if relative == 0 else math.inf)
        if ratio > self.closest:
            self.closest = ratio
            self.largest = relative
            self.bound = bound


@dataclass
class Judge:
    """Compares the records of one run with a reference.

    Attributes:
        failures: tensors beyond their bounds, by what they are and by rank.
        uncompared: logical tensors that the reference does not have in that shape.
        notes: what else is not compared.
        has_sharded_activations: whether sequence parallelism makes gradients of replicated
            parameters parts of a sum.
    """

    mesh: Mesh
    records: Sequence[RankRecord]
    bounds: Bounds
    stats: dict[Phase, PhaseStats] = field(default_factory=dict)
    failures: dict[Site, dict[int, Failure]] = field(default_factory=dict)
    uncompared: set[str] = field(default_factory=set)
    has_sharded_activations: bool = False
    notes: list[str] = field(default_factory=list)

    def compare(self) -> tuple[Difference, ...]:
        """Compare everything; the differences in the order of execution."""
        for record in self.records:
            self._compare_values(record)
            self._compare_types(record)
            self._compare_numbers(record)
        self._compare_partial_gradients()
        self._compare_sums()
        self._compare_loads()
        self._compare_coverage()
        self._compare_own_state()
        self._drop_after_rerouting()
        return self._localisation.differences()

    @property
    def _localisation(self) -> Localisation:
        return Localisation(self.mesh, self.records, self.bounds, self.failures, self.sums)

    @cached_property
    def sums(self) -> GradientSums:
        """The gradients of all ranks before their reduction."""
        return GradientSums(self.mesh, self.records, self.bounds)

    def phase_bounds(self) -> tuple[PhaseBound, ...]:
        """How close each phase came to its bounds."""
        found = []
        for phase in PHASES:
            stats = self.stats.get(phase)
            if stats is not None:
                closest = max(stats.closest, 0.0)
                found.append(PhaseBound(phase, stats.compared, stats.largest, stats.bound, closest))
        return tuple(found)

    # tensors of one rank

    def _compare_values(self, record: RankRecord) -> None:
        for site, observed in record.values.items():
            if self._is_skipped(site):
                continue
            key = key_of(site)
            whole = self.bounds.plain.values.get(key)
            if whole is None:
                self.uncompared.add(f"{site.phase} {site.tensor}")
                continue
            expected = observed.place.read(whole)
            if expected is None:
                self.uncompared.add(f"{site.phase} {site.tensor}")
                continue
            if site.phase == "checkpoint":
                self._compare_restored(record, site, observed)
            expected = expected.reshape(observed.value.shape)
            self._check(site, record.rank, observed, expected, key)

    def _is_skipped(self, site: Site) -> bool:
        """Whether the gradients of a step overflowed: they have no values to compare."""
        return site.step in self.bounds.plain.skipped and site.phase in PHASE_OF_GRADIENTS

    def _check(
        self, site: Site, rank: int, observed: Observed, expected: Tensor, key: TensorKey
    ) -> None:
        value = observed.value
        bound = self.bounds.bound(key)
        relative = largest_difference(value, expected) / self.bounds.scale(key)
        if relative > bound and site.phase == "backward" and site.micro_batch is not None:
            relative = min(relative, self._partial_relative(site, rank, expected, key))
        if relative > bound:
            relative = min(relative, self._determined_relative(site, observed, expected, key))
        self.stats.setdefault(site.phase, PhaseStats()).add(relative, bound)
        if not relative <= bound:
            failure = Failure(rank, observed, expected, relative, bound)
            self.failures.setdefault(site, {})[rank] = failure

    def _determined_relative(
        self, site: Site, observed: Observed, expected: Tensor, key: TensorKey
    ) -> float:
        """Of the entries of a parameter whose update does not depend on rounding, if the others are
        within a few learning rates; else infinite.
        """
        step = site.step - 1 if site.tensor.endswith(" as used") else site.step
        is_value = site.phase in ("update", "checkpoint") and key.phase == "update"
        if not site.parameter or not (is_value or step < site.step):
            return math.inf
        whole = self.bounds.undetermined(site.parameter, step)
        mask = None if whole is None else observed.place.read(whole)
        if mask is None or observed.value.shape != expected.shape:
            return math.inf
        difference = (observed.value.double() - expected.double()).abs()
        is_free = mask.reshape(difference.shape)
        unit = self.bounds.types.eps * float(expected.abs().max())
        if not bool((difference[is_free] <= self.bounds.largest_updates(step) + unit).all()):
            return math.inf
        rest = difference[~is_free]
        largest = float(rest.max()) if rest.numel() else 0.0
        return largest / self.bounds.scale(key)

    def _partial_relative(self, site: Site, rank: int, expected: Tensor, key: TensorKey) -> float:
        """Of a gradient whose parts are summed over tensor-parallel ranks only later."""
        parts = []
        for member in self.mesh.group(rank, activation_axes()):
            observed = self.records[member].values.get(site)
            if observed is None or observed.value.shape != expected.shape:
                return math.inf
            parts.append(observed.value)
        if len(parts) == 1:
            return math.inf
        total = torch.stack(parts).double().sum(0)
        return largest_difference(total, expected) / self.bounds.scale(key)

    def _compare_restored(self, record: RankRecord, site: Site, observed: Observed) -> None:
        """What a checkpoint restores is what was saved, to the last bit."""
        phase: Phase = "update" if site.tensor == site.parameter else "moments"
        saved_site = Site(site.step, phase, site.block, site.tensor, site.parameter)
        saved = record.values.get(saved_site)
        if saved is None or torch.equal(saved.value, observed.value):
            return
        difference = largest_difference(observed.value, saved.value)
        scale = self.bounds.scale(key_of(site))
        failure = Failure(record.rank, observed, saved.value, difference / scale, 0.0)
        self.failures.setdefault(site, {})[record.rank] = failure

    # number types

    def _compare_types(self, record: RankRecord) -> None:
        """What trained parameters, their gradients and their moments are held in. A coarser type
        than that of the run, or values that were in one, may move no tensor beyond its bound.
        """
        for site, observed in record.values.items():
            right = self._right_dtype(site)
            if right is None or observed.dtype is None or self._is_skipped(site):
                continue
            expected = observed.place.read(self.bounds.plain.values[key_of(site)])
            if expected is None or expected.numel() != observed.value.numel():
                continue
            text = ""
            if observed.dtype != right:
                text = f"in {dtype_text(observed.dtype)} in place of {dtype_text(right)}"
            elif site.phase == "update":
                coarse = rounded_to(observed.value, expected.reshape(observed.value.shape))
                text = f"rounded to {dtype_text(coarse)}" if coarse is not None else ""
            if text:
                unit = torch.finfo(observed.dtype).eps
                failure = Failure(record.rank, observed, expected, unit, 0.0, text)
                self._fail(site, failure)

    def _right_dtype(self, site: Site) -> torch.dtype | None:
        """The number type of a tensor by the config; None: it has none of its own."""
        gradient = TensorKey(site.step, "reduce", f"{site.parameter} gradient")
        if gradient not in self.bounds.plain.values:
            return None
        types = self.bounds.types
        if site.phase == "reduce":
            return types.reduce
        if site.phase == "clip" or (site.phase == "update" and site.tensor == site.parameter):
            return types.params
        whole = self.bounds.plain.values.get(key_of(site))
        if site.phase == "moments" and whole is not None and whole.dim():
            return whole.dtype
        return None

    # numbers of a step

    def _compare_numbers(self, record: RankRecord) -> None:
        for event in record.events:
            if event["event"] == "eval":
                self._compare_evaluation(record, event)
            if event["event"] != "step":
                continue
            step = int(event["step"])
            is_skipped = step in self.bounds.plain.skipped
            self._number(record, Site(step, "batch", "", "number of targets"), event["tokens"])
            self._number(record, Site(step, "loss", "", "loss"), event["loss"])
            self._number(record, Site(step, "update", "", "learning rate"), event["lr"])
            if not is_skipped:
                norm = Site(step, "norm", "", "gradient norm")
                self._number(record, norm, event["grad_norm"])
                factor = _clip_factor(record, step)
                if factor is not None:
                    self._number(record, Site(step, "clip", "", "clip factor"), factor)

    def _compare_evaluation(self, record: RankRecord, event: Event) -> None:
        step = int(event["step"])
        targets = Site(step, "evaluation", "", "number of targets")
        self._number(record, targets, event["tokens"])
        self._number(record, Site(step, "evaluation", "", "evaluation loss"), event["loss"])

    def _number(self, record: RankRecord, site: Site, value: float) -> None:
        key = TensorKey(site.step, site.phase, site.tensor)
        expected = self.bounds.plain.values.get(key)
        if expected is None:
            return
        tensor = torch.tensor(float(value), dtype=torch.float64)
        operation = record.norm_operations.get(site.step) if site.phase in STEP_NUMBERS else None
        if site.block:
            name = site.tensor.removeprefix(f"{site.block}.")
            operation = record.sum_operations.get((site.step, site.block, name))
        self._check(site, record.rank, Observed(tensor, Whole(), operation), expected, key)

    # sums over ranks

    def _compare_partial_gradients(self) -> None:
        """Before their reduction the gradients of all ranks must add up to the right one."""
        groups: dict[tuple[int, str, Coordinates], list[tuple[int, PartialGradient]]] = {}
        for record in self.records:
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
        for axis, index in self.mesh.coord(rank).items():
            if axis not in left_out:
                found.append((axis, index))
        return tuple(found)

    def _compare_partial_group(
        self, step: int, owner: str, members: Sequence[tuple[int, PartialGradient]]
    ) -> None:
        block = owner.partition(".")[0]
        site = Site(step, "backward", block, f"{owner} gradient", owner)
        key = TensorKey(step, "backward", f"{owner} gradient")
        whole = self.bounds.plain.values.get(key)
        if whole is None or self._is_skipped(site):
            return
        total = torch.stack([partial.value for _, partial in members]).sum(0)
        for rank, partial in members:
            place = ShardPlace(partial.param.shard)
            expected = place.read(whole)
            assert expected is not None, "a shard lies in its parameter"
            is_wrong = self.bounds.relative(total, expected, key) > self.bounds.bound(key)
            if is_wrong and self._has_right_terms(step, partial.param, rank):
                continue  # their reduction is compared after it
            observed = Observed(total, place, partial.operation)
            self._check(site, rank, observed, expected, key)

    def _has_right_terms(self, step: int, param: ParamShard, rank: int) -> bool:
        """Whether the ranks' own gradients add up to the right one over axes over which gradients
        of this parameter may be summed. Over others every rank must have all of it.
        """
        right = self.sums.right_axes(step, param.name, rank)
        summed = {*token_axes(), *param.reduce_axes}
        if self.has_sharded_activations:
            summed.update(activation_axes())
        return right is not None and summed.issuperset(right)

    def _compare_sums(self) -> None:
        """Losses of each block, summed over the ranks with different tokens."""
        totals: dict[tuple[int, str, str, Coordinates], float] = {}
        ranks: dict[tuple[int, str, str, Coordinates], list[int]] = {}
        for record in self.records:
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
                self._number(self.records[rank], site, total)

    def _is_copy(self, rank: int) -> bool:
        """Whether another rank computes the loss of the same tokens and counts before this one."""
        coord = self.mesh.coord(rank)
        return any(coord.get(axis, 0) > 0 for axis in replicated_axes())

    def _compare_loads(self) -> None:
        """Tokens at each expert, summed over the ranks with different tokens; exact in float64."""
        totals: dict[tuple[int, str, Coordinates], Tensor] = {}
        ranks: dict[tuple[int, str, Coordinates], list[int]] = {}
        for record in self.records:
            for (step, block), load in record.loads.items():
                group = (step, block, self._coordinates(record.rank, token_axes()))
                totals[group] = totals.get(group, torch.zeros_like(load)) + load
                ranks.setdefault(group, []).append(record.rank)
        for group, total in totals.items():
            step, block, _ = group
            site = Site(step, "forward", block, f"{block}.expert load")
            key = TensorKey(step, "forward", site.tensor)
            whole = self.bounds.plain.values.get(key)
            if whole is None:
                continue
            for rank in ranks[group]:
                observed = Observed(total, Whole(), None)
                self._check(site, rank, observed, whole, key)

    def _compare_coverage(self) -> None:
        """Every entry of every parameter lies on some rank."""
        held: dict[str, set[object]] = {}
        sizes: dict[str, int] = {}
        for record in self.records:
            for param in record.shards.values():
                shards = held.setdefault(param.owner, set())
                if param.shard not in shards:
                    shards.add(param.shard)
                    sizes[param.owner] = sizes.get(param.owner, 0) + param.shard.size
        for key, whole in self.bounds.plain.values.items():
            if key.phase != "update" or key.step != 1 or key.tensor == "learning rate":
                continue
            stats = self.stats.setdefault("forward", PhaseStats())
            stats.add(0.0, 1.0)
            if sizes.get(key.tensor, 0) != whole.numel():
                block = key.tensor.partition(".")[0]
                site = Site(1, "forward", block, f"{key.tensor} as used", key.tensor)
                observed = Observed(torch.zeros(0), Whole(), None)
                failure = Failure(0, observed, whole, math.inf, 0.0)
                self.failures.setdefault(site, {})[0] = failure

    def _drop_after_rerouting(self) -> None:
        """In 16 bits rounding may decide to which expert a token goes. Then what follows is of other
        tokens, and bounds say nothing of it; the same layout was compared in float64 before.
        """
        if self.bounds.types.eps <= torch.finfo(torch.float32).eps:
            return
        for site in sorted(self.failures, key=self._localisation.order):
            if not site.tensor.endswith(".expert load"):
                continue
            failure = next(iter(self.failures[site].values()))
            load = failure.expected.double()
            moved = float((failure.observed.value.double() - load).abs().sum()) / 2
            if moved > max(MOST_REROUTED * float(load.sum()), MIN_REROUTED):
                return
            self.notes.append(
                f"not compared in 16 bits: what follows {site.block} in step {site.step}, "
                f"where rounding routes {moved:g} of {float(load.sum()):g} tokens to other experts"
            )
            self._drop_after(site)
            return

    def _drop_after(self, routed: Site) -> None:
        """Forget failures that may follow from another routing; not those of equality to the bit."""
        blocks = self.bounds.plain.blocks
        before = set(blocks[: blocks.index(routed.block)])
        for site in list(self.failures):
            is_earlier = site.step < routed.step or site.phase == "batch"
            is_earlier_block = (
                site.step == routed.step and site.phase == "forward" and site.block in before
            )
            if is_earlier or is_earlier_block:
                continue
            kept = {}
            for rank, failure in self.failures.pop(site).items():
                if failure.bound == 0.0:
                    kept[rank] = failure
            if kept:
                self.failures[site] = kept

    # the layout with itself

    def _compare_own_state(self) -> None:
        """Replicas of a parameter are bit-equal, and the next step uses the updated values, rounded
        once. In 16 bits the bounds of these tensors are wider than an update.
        """
        states: dict[tuple[int, str], Tensor] = {}
        for record in self.records:
            for site, observed in record.values.items():
                if site.phase == "update":
                    self._join(states, record.rank, site, observed)
        for record in self.records:
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
        shape = self.bounds.plain.values[key_of(site)].shape
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
                relative /= self.bounds.scale(key_of(site))
                expected = observed.place.read(self.bounds.plain.values[key_of(site)])
                assert expected is not None, "the boxes lie in the parameter"
                self._fail(site, Failure(rank, observed, expected, relative, 0.0))

    def _fail(self, site: Site, failure: Failure) -> None:
        """Count a tensor that must be equal to the last bit."""
        self.stats.setdefault(site.phase, PhaseStats()).add(failure.measured, failure.bound)
        self.failures.setdefault(site, {}).setdefault(failure.rank, failure)

    def _check_use(self, rank: int, site: Site, observed: Observed, state: Tensor) -> None:
        local = observed.place.read(state)
        if local is None or bool(torch.isnan(local).any()):
            return
        expected = local.to(observed.value.dtype)
        if torch.equal(expected, observed.value):
            return
        relative = largest_difference(observed.value, expected)
        relative /= self.bounds.scale(key_of(site))
        self._fail(site, Failure(rank, observed, expected, relative, 0.0))


def _clip_factor(record: RankRecord, step: int) -> float | None:
    """Ratio of this rank's clipped gradients to the unclipped ones; None without gradients."""
    product = 0.0
    square = 0.0
    for site, after in record.values.items():
        if site.step != step or site.phase != "clip":
            continue
        title = f"{site.parameter} gradient"
        before_site = Site(step, "reduce", site.block, title, site.parameter)
        before = record.values.get(before_site)
        if before is not None and before.value.shape == after.value.shape:
            product += float((before.value * after.value).sum())
            square += float(before.value.square().sum())
    return product / square if square else None
