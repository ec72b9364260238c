"""The check of a live step on one rank: outputs are projected while it runs, then the plain pass, the comparison, the verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.core.dimension import local_update_axes, pipeline_axis, plain_data_axes
from weft.errors import ProofError
from weft.models.common.batch import Batch
from weft.models.common.buffer_updates import evaluating
from weft.models.common.preference import preference_loss_of
from weft.prove.live_step.compared_numbers import LiveDifference
from weft.prove.live_step.due import Due
from weft.prove.live_step.gradient_rows import GradientRows, local_gradients
from weft.prove.live_step.initial_values import InitialValues
from weft.prove.live_step.judgement import Judgement
from weft.prove.live_step.memory import available_bytes, needed_bytes
from weft.prove.live_step.meta_chain import MetaChain
from weft.prove.live_step.output_sketch import OutputSketches, Projection
from weft.prove.live_step.own_updates import OwnUpdates, can_compare_updates
from weft.prove.live_step.owner_gradients import GradientNoise
from weft.prove.live_step.plain_pass import PlainPass
from weft.prove.live_step.refusal import Kept, refusal
from weft.prove.live_step.replica import ReplicaOfRank, any_rank
from weft.prove.live_step.step_parts import LiveStep, PlainStep
from weft.prove.live_step.tables import with_noise, world_tables
from weft.prove.live_step.units import Unit, num_units, units_of_rank
from weft.prove.live_step.verdict import different, not_compared, verdict_of, verdict_text
from weft.prove.live_step.whole_params import WholeParameters, sum_over_ranks
from weft.prove.places import RankPlaces
from weft.prove.raw_batch import batch_of, with_draw_keys
from weft.prove.subject import LiveTask
from weft.train.data_loader import samples_of
from weft.train.step import ComputedStep
from weft.train.step_check import OnGradients, ProofRecord
from weft.train.step_stats import StepTotals
from weft.train.training import Event, Training

MOST_TOKENS = 512
"""Tokens that go through a block at once: more of them make products of matrices hardly faster."""
OVERFLOW = (
    "in float16 its gradients overflow on one device, which adds those of whole sequences, and not "
    "on the layout, which adds parts of them; the next step is compared"
)
SHARE_OF_GRAPHS = 4
"""Graphs of the plain forward take one part in so many of the free memory of a rank."""


class LiveStepCheck:
    """Compares steps of a training run with one device; see Note [Live step].

    Args:
        is_new: whether the run starts from its initial values.
    """

    def __init__(
        self, training: Training, task: LiveTask, *, due: Due, record: ProofRecord, is_new: bool
    ) -> None:
        self.training = training
        self.task = task
        self.due = due
        self.record = record
        self.is_new = is_new
        self.step = training.step
        self.comm = training.step.model.comm
        self.types = task.types
        self._events: list[Event] = []
        self._again = False
        self._chain: MetaChain | None = None

    # the contract of `StepCheck`

    def is_due(self, number: int) -> bool:
        """Whether step `number` is compared; one that was skipped by an overflow is made up for."""
        return self._again or self.due(number)

    def take_events(self) -> Iterator[Event]:
        """The verdicts since the last call."""
        events, self._events = self._events, []
        yield from events

    @contextmanager
    def watch(
        self, number: int, batch_number: int, batches: Sequence[Batch]
    ) -> Iterator[OnGradients]:
        """Project the outputs of blocks while the step runs; compare when its gradients are there."""
        self._again = False
        reason = self._why_not()
        if reason:
            self._events.append(not_compared(number, reason))
            yield _ignore
            return
        sketches = OutputSketches(
            tuple(self._plain_chain().blocks),
            self._places(),
            self._projection,
            self.comm.device,
            vocab=self.task.model.axis_sizes().get("vocab", 0),
        )

        compared: list[LiveStep] = []

        def compare(computed: ComputedStep, totals: StepTotals) -> None:
            live = LiveStep(number, batch_number, sketches, computed, totals)
            if not live.is_finite:
                self._again = True  # guards and the loss scale judge such a step
                return
            if self._compare(live):
                self._keep_for_update(live)
                # Its update is compared after the block, once the step has made it.
                compared.append(live)

        with sketches.watch(self.step.model.blocks, batches):
            yield compare
        for live in compared:
            self._compare_update(live)
            self._report(live)

    # what is compared

    def _plain_chain(self) -> MetaChain:
        if self._chain is None:
            self._chain = MetaChain.of(
                self.task.family,
                self.task.model,
                device=self.comm.device,
                compute=self.types.compute,
                has_token_losses=self.step.model.plan.chunked_losses,
            )
        return self._chain

    @property
    def _projection(self) -> Projection:
        seq_len = self.step.model.plan.seq_len if self._has_columns else None
        return Projection(seq_len, self.comm.device)

    @property
    def _replica(self) -> ReplicaOfRank:
        return ReplicaOfRank(self.comm, self.step.model.plan.global_size)

    @property
    def _has_columns(self) -> bool:
        return self.task.model.kind == "tokens"

    def _places(self) -> RankPlaces:
        plan = self.step.model.plan
        num_runs = self._replica.num_replicas
        if self.step.fixed_order and plan.zero < 2:
            num_runs = plan.mesh.degree(plain_data_axes())
        return RankPlaces(plan, self.comm.rank, has_columns=self._has_columns, num_runs=num_runs)

    def _units(self, index: int, *, is_perturbed: bool) -> tuple[Unit, ...]:
        return units_of_rank(
            index,
            self._replica.num_ranks,
            global_size=self._replica.num_sequences,
            micro_size=self.step.model.plan.normalised_size,
            is_perturbed=is_perturbed,
            most_rows=self._most_rows,
            is_whole=bool(self._plain_chain().updated),
        )

    @property
    def _num_terms(self) -> int:
        """Tokens that go through a block at once."""
        units = self._units(0, is_perturbed=False)
        num_rows = max((len(unit.rows) for unit in units), default=1)
        return num_rows * (self.step.model.plan.seq_len if self._has_columns else 1)

    @property
    def _has_noise(self) -> bool:
        """Whether bounds depend on noise."""
        return not self.types.is_exact or self.task.is_user_model

    @property
    def _defers_noise(self) -> bool:
        """Whether noise is measured only where numbers differ by more than the bounds without it.
        They hardly do where blocks of the layout compute whole sequences with whole parameters, by
        kernels that compute a row alike however many there are.
        """
        axes = {*plain_data_axes(), pipeline_axis(), *local_update_axes()}
        is_alike = axes.issuperset(self.comm.mesh.wide_axes) and self.comm.device.type == "cpu"
        return self._has_noise and not self.types.has_16_bits and is_alike

    @property
    def _most_rows(self) -> int:
        """Sequences that are computed at once. In 16 bits sums over tokens lose digits, so parts are
        as small as those of the layout there.
        """
        if self.types.has_16_bits:
            return 1
        return MOST_TOKENS // (self.step.model.plan.seq_len if self._has_columns else 1)

    def _why_not(self) -> str:
        """Why steps cannot be compared; equal on all ranks."""
        plan = self.step.model.plan
        need = needed_bytes(
            self._plain_chain(),
            self._units(0, is_perturbed=self._has_noise),
            seq_len=plan.seq_len,
            itemsize=self.types.compute.itemsize,
        )
        if not any_rank(self.comm, need > available_bytes(self.comm)):
            return ""
        return f"one device's pass needs {need / 2**30:.1f} GiB a rank, more than is free"

    # the comparison

    def _compare(self, live: LiveStep) -> bool:
        """Compute the step as one device does, and judge it; whether it could be judged.

        Raises:
            ProofError: it differs.
        """
        start_s = time.perf_counter()
        with self._undisturbed():
            plain = self._plain_step(live)
        tables = world_tables(
            self.comm,
            self._plain_chain(),
            live.sketches,
            plain.numbers,
            plain.rows,
            sequences=self._replica.sequences,
            flagged=(plain.initial.unlike_definition, plain.whole.unequal),
            loads=live.computed.loads,
        )
        if self.types.compute == torch.float16 and not math.isfinite(tables.plain.norm):
            self._again = True
            self._events.append(not_compared(live.number, OVERFLOW))
            return False
        loss, norm, targets = self._replica.logged(
            loss=tables.plain.loss / max(live.plain_targets, 1),
            norm=tables.plain.norm,
            targets=live.plain_targets,
        )
        judgement = Judgement(
            blocks=tuple(self._plain_chain().blocks),
            types=self.types,
            layout=replace(tables.layout, loss=live.loss, norm=live.norm, targets=live.targets),
            plain=replace(tables.plain, loss=loss, norm=norm, targets=targets),
            unlike_definition=tables.unlike_definition,
            unequal=tables.unequal,
            outputs=tables.outputs,
            gradients=tables.gradients,
            output_spread=tables.output_spread,
            loss_spread=tables.loss_spread,
            num_units=num_units(
                global_size=self._replica.num_sequences,
                micro_size=self.step.model.plan.normalised_size,
                is_whole=bool(self._plain_chain().updated),
            ),
            num_terms=self._num_terms if self._defers_noise else None,
        )
        # On every rank or on none: perturbed passes gather parameters from all of them.
        if self._defers_noise and any_rank(self.comm, bool(judgement.differences)):
            judgement = self._with_noise(live, judgement, plain.whole)
        self._conclude(live, judgement, plain.rows, time.perf_counter() - start_s)
        return True

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Gradients are computed in the block, and no random number of the run is drawn."""
        # A user's model may draw from torch's own generator; the next step must draw as if nothing had been compared.
        rng_state = torch.get_rng_state()
        with torch.enable_grad(), self.comm.unchecked():
            yield
        torch.set_rng_state(rng_state)

    def _with_noise(
        self, live: LiveStep, judgement: Judgement, whole: WholeParameters
    ) -> Judgement:
        """The judgement with bounds by noise, which perturbed passes of some sequences measure."""
        units = self._units(self._replica.rank, is_perturbed=True)
        perturbed = tuple(unit for unit in units if unit.noise_seeds)
        noise: dict[str, GradientNoise] = {}

        def keep(owner: str, _: Tensor, of_owner: GradientNoise) -> None:
            noise[owner] = of_owner.times(1 / live.computed.scale)

        with self._undisturbed():
            numbers = self._passes(live, whole, perturbed).run(keep)
        return with_noise(self.comm, judgement, numbers, noise)

    def _plain_step(self, live: LiveStep) -> PlainStep:
        """The plain pass of the step over all ranks."""
        chain = self._plain_chain()
        dtype: torch.dtype = getattr(torch, self.step.model.plan.params)
        initial = InitialValues(
            self.task,
            self.comm,
            dtype=dtype,
            frozen_dtype=self.types.compute,
            trained=chain.trained,
            is_checked=self._checks_initial(live),
        )
        whole = WholeParameters(self.step, dtype, on_gathered=initial.compare)
        whole.gather_buffers(chain.updated)
        is_perturbed = self._has_noise and not self._defers_noise
        units = self._units(self._replica.rank, is_perturbed=is_perturbed)
        batches = self._batches(live, units)
        live.plain_targets = self._total(sum(int(batch.num_targets()) for batch in batches))
        self._estimate_z0(live, whole, units)
        scale = live.computed.scale
        rows = GradientRows(
            self.comm,
            local_gradients(self.step, scale=scale),
            scale=scale,
            eps=self.types.eps,
            products=chain.products,
            routers=chain.routers,
        )
        numbers = self._passes(live, whole, units).run(rows.add)
        return PlainStep(numbers, rows, whole, initial)

    def _estimate_z0(self, live: LiveStep, whole: WholeParameters, units: Sequence[Unit]) -> None:
        """Set z0 of the plain loss, where it is KTO: by a forward of the whole step without dropout
        and noise.
        """
        loss = preference_loss_of(self._plain_chain().blocks)
        if loss is None or not loss.dpo.has_labels:
            return
        loss.z0 = None
        # z0 is the mean of plain passes; perturbed ones would be computed for nothing.
        exact = [replace(unit, noise_seeds=()) for unit in units]
        with evaluating(self._plain_chain().blocks):
            losses = self._passes(live, whole, exact, draws=False).losses()
        total = sum_over_ranks(self.comm, losses).sum()
        loss.z0 = (total / max(live.plain_targets, 1)).clamp(min=0)

    def _passes(
        self, live: LiveStep, whole: WholeParameters, units: Sequence[Unit], *, draws: bool = True
    ) -> PlainPass:
        """Passes of these units through the chain.

        Args:
            draws: whether something is dropped; else nothing is, and no graph is kept.
        """
        batches = self._batches(live, units)
        if not draws:
            batches = [replace(batch, draw_keys=None) for batch in batches]
        return PlainPass(
            self._plain_chain(),
            whole,
            self.types,
            units=units,
            batches=batches,
            num_sequences=self._replica.num_sequences,
            projection=live.sketches.projection,
            seed_of_loss=live.computed.scale / max(live.plain_targets, 1),
            most_kept_bytes=available_bytes(self.comm) // SHARE_OF_GRAPHS if draws else 0,
        )

    def _batches(self, live: LiveStep, units: Sequence[Unit]) -> list[Batch]:
        """The whole sequences of these units."""
        of_step = samples_of(
            self.training.loader.samples,
            live.batch_number,
            global_size=self.step.model.plan.global_size,
            seed=self.training.loader.seed,
        )
        chosen = of_step[self._replica.sequences]
        first = live.batch_number * len(of_step) + self._replica.sequences.start
        return [
            with_draw_keys(
                self._batch(chosen[list(unit.rows)]),
                [first + row for row in unit.rows],
                seed=self.training.loader.seed,
            )
            for unit in units
        ]

    def _checks_initial(self, live: LiveStep) -> bool:
        return self.is_new and live.number == 1

    def _batch(self, samples: Any) -> Batch:
        """Whole sequences, by the definition of the data, on this rank's device."""
        batch = batch_of(
            self.training.loader.samples, samples, later=self.task.model.reads_later_targets
        )
        return batch.map(lambda x: x.to(self.comm.device))

    def _total(self, number: int) -> int:
        local = torch.tensor([number], dtype=torch.int64, device=self.comm.device)
        return int(sum_over_ranks(self.comm, local))

    # the verdict

    def _conclude(
        self, live: LiveStep, judgement: Judgement, rows: GradientRows, seconds: float
    ) -> None:
        if any_rank(self.comm, bool(judgement.differences)):
            outcome = "Nothing was updated by it"
            self._refuse(live, judgement.differences, rows, outcome=outcome)
        live.verdict = verdict_of(
            judgement,
            number=live.number,
            num_sequences=self.step.model.plan.global_size,
            has_initial_values=self._checks_initial(live),
            seconds=seconds,
        )

    def _refuse(
        self, live: LiveStep, differences: Sequence[LiveDifference], own: Kept, *, outcome: str
    ) -> NoReturn:
        repeat = self.task.repeat()
        reason = refusal(self.comm, live.number, differences, own, outcome=outcome, repeat=repeat)
        self._events.append(different(live.number, reason))
        raise ProofError(reason)

    def _keep_for_update(self, live: LiveStep) -> None:
        """Keep what the update is made of, where its state before is known: that of a new run."""
        if self._checks_initial(live) and can_compare_updates(self.step, self.task):
            chain, scale = self._plain_chain(), live.computed.scale
            live.updates = OwnUpdates.before_update(self.step, self.task, chain, scale=scale)

    def _compare_update(self, live: LiveStep) -> None:
        """Compare the update with the optimizer's formula.

        Raises:
            ProofError: it differs.
        """
        updates = live.updates
        if updates is None:
            return
        start_s = time.perf_counter()
        differences = updates.differences(
            live.number, total=self.training.step_range.total, norm=live.norm
        )
        if differences:
            self._refuse(live, differences, updates, outcome="It was not saved")
        live.verdict["updates"] = len(updates.owners)
        live.verdict["seconds"] += round(time.perf_counter() - start_s, 3)

    def _report(self, live: LiveStep) -> None:
        verdict = live.verdict
        self.record.step = verdict
        text = verdict_text(verdict, self.record.before, is_first=live.number == self.due.first)
        self._events.append({"event": "proof", "text": text, **verdict})


def _ignore(computed: ComputedStep, totals: StepTotals) -> None:
    """Compare nothing."""
