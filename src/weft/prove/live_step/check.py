"""The check of a live step on one rank: outputs are projected while it runs, then the plain pass, the comparison, the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.core.dimension import data_axis
from weft.errors import ProofError, counted
from weft.models.common.batch import Batch
from weft.prove.live_step.gradient_rows import GradientRows, local_gradients
from weft.prove.live_step.initial_values import InitialValues
from weft.prove.live_step.judgement import Judgement
from weft.prove.live_step.memory import available_bytes, needed_bytes
from weft.prove.live_step.meta_chain import MetaChain
from weft.prove.live_step.output_sketch import OutputSketches, Projection
from weft.prove.live_step.plain_pass import PassNumbers, PlainPass
from weft.prove.live_step.refusal import refusal
from weft.prove.live_step.replica import ReplicaOfRank, any_rank
from weft.prove.live_step.tables import world_tables
from weft.prove.live_step.units import num_units, units_of_rank
from weft.prove.live_step.whole_params import WholeParameters, sum_over_ranks
from weft.prove.places import RankPlaces
from weft.prove.raw_batch import batch_of
from weft.prove.subject import LiveTask
from weft.train.data_loader import samples_of
from weft.train.step import ComputedStep
from weft.train.step_check import OnGradients, ProofRecord
from weft.train.step_stats import StepTotals
from weft.train.training import Event, Training

SHARE_OF_GRAPHS = 4
"""Graphs of the plain forward take one part in so many of the free memory of a rank."""


@dataclass(frozen=True)
class Due:
    """Which steps are compared.

    Attributes:
        first: the first step of this start; None: not because it is the first.
        every: and each step whose number this divides; 0: none.
    """

    first: int | None
    every: int = 0

    def __call__(self, number: int) -> bool:
        """Whether step `number` is compared."""
        return number == self.first or (self.every > 0 and number % self.every == 0)


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
            self._events.append(_not_compared(number, reason))
            yield _ignore
            return
        sketches = OutputSketches(
            tuple(self._plain_chain().blocks),
            self._places(),
            self._projection,
            self.comm.device,
            vocab=self.task.model.axis_sizes().get("vocab", 0),
        )

        def compare(computed: ComputedStep, totals: StepTotals) -> None:
            live = _LiveStep(number, batch_number, sketches, computed, totals)
            self._compare(live)

        with sketches.watch(self.step.model.blocks, batches):
            yield compare

    # what is compared

    def _plain_chain(self) -> MetaChain:
        if self._chain is None:
            self._chain = MetaChain.of(
                self.task.family,
                self.task.model,
                device=self.comm.device,
                compute=self.types.compute,
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
            num_runs = plan.mesh.degree(data_axis())
        return RankPlaces(plan, self.comm.rank, has_columns=self._has_columns, num_runs=num_runs)

    def _units(self, index: int) -> tuple[Any, ...]:
        plan = self.step.model.plan
        return units_of_rank(
            index,
            self._replica.num_ranks,
            global_size=self._replica.num_sequences,
            micro_size=plan.micro_size,
            is_perturbed=not self.types.is_exact or self.task.is_user_model,
        )

    def _why_not(self) -> str:
        """Why steps cannot be compared; equal on all ranks."""
        plan = self.step.model.plan
        need = needed_bytes(
            self._plain_chain(),
            self._units(0),
            seq_len=plan.seq_len,
            itemsize=self.types.compute.itemsize,
        )
        if not any_rank(self.comm, need > available_bytes(self.comm)):
            return ""
        return f"one device's pass needs {need / 2**30:.1f} GiB a rank, more than is free"

    # the comparison

    def _compare(self, live: _LiveStep) -> None:
        """Compute the step as one device does, and judge it.

        Raises:
            ProofError: it differs.
        """
        start_s = time.perf_counter()
        if not live.is_finite:
            self._again = True  # guards and the loss scale judge such a step
            return
        rng_state = torch.get_rng_state()
        with torch.enable_grad(), self.comm.unchecked():
            pass_, rows, whole, initial = self._plain_step(live)
        torch.set_rng_state(rng_state)
        tables = world_tables(
            self.comm,
            self._plain_chain(),
            live.sketches,
            pass_,
            rows,
            sequences=self._replica.sequences,
            flagged=(initial.unlike_definition, whole.unequal),
            loads=live.computed.loads,
        )
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
                global_size=self._replica.num_sequences, micro_size=self.step.model.plan.micro_size
            ),
        )
        self._conclude(live, judgement, rows, time.perf_counter() - start_s)

    def _plain_step(
        self, live: _LiveStep
    ) -> tuple[PassNumbers, GradientRows, WholeParameters, InitialValues]:
        """The plain pass of the step over all ranks."""
        step = self.step
        plan = step.model.plan
        chain = self._plain_chain()
        units = self._units(self._replica.rank)
        of_step = samples_of(
            self.training.loader.samples,
            live.batch_number,
            global_size=plan.global_size,
            seed=self.training.loader.seed,
        )
        chosen = of_step[self._replica.sequences]
        batches = [self._batch(chosen[unit.rows.start : unit.rows.stop]) for unit in units]
        local_targets = sum(int(batch.num_targets()) for batch in batches)
        live.plain_targets = self._total(local_targets)
        scale = live.computed.scale
        dtype: torch.dtype = getattr(torch, plan.params)
        initial = InitialValues(
            self.task,
            self.comm,
            dtype=dtype,
            frozen_dtype=self.types.compute,
            trained=chain.trained,
            is_checked=self._checks_initial(live),
        )
        whole = WholeParameters(step, dtype, on_gathered=initial.compare)
        passes = PlainPass(
            chain,
            whole,
            self.types,
            units=units,
            batches=batches,
            num_sequences=self._replica.num_sequences,
            projection=live.sketches.projection,
            seed_of_loss=scale / max(live.plain_targets, 1),
            most_kept_bytes=available_bytes(self.comm) // SHARE_OF_GRAPHS,
        )
        rows = GradientRows(
            self.comm,
            local_gradients(step, scale=scale),
            scale=scale,
            eps=self.types.eps,
            products=chain.products,
            routers=chain.routers,
        )
        numbers = passes.run(rows.add)
        return numbers, rows, whole, initial

    def _checks_initial(self, live: _LiveStep) -> bool:
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
        self, live: _LiveStep, judgement: Judgement, rows: GradientRows, seconds: float
    ) -> None:
        if any_rank(self.comm, bool(judgement.differences)):
            reason = refusal(self.comm, live.number, judgement, rows, repeat=self.task.repeat())
            self._events.append(_different(live.number, reason))
            raise ProofError(reason)
        plan = self.step.model.plan
        verdict = {
            "verdict": "equal",
            "step": live.number,
            "sequences": plan.global_size,
            "tokens": judgement.plain.targets,
            "gradients": len(judgement.gradients) - len(judgement.unseen),
            "all_gradients": len(judgement.gradients),
            "projected_gradients": len(judgement.projected),
            "outputs": len(judgement.outputs),
            "closest": round(judgement.closest, 4),
            "initial_values": self._checks_initial(live),
            "notes": list(judgement.notes),
            "seconds": round(seconds, 3),
        }
        self.record.step = verdict
        text = verdict_text(verdict, self.record.before, is_first=live.number == self.due.first)
        self._events.append({"event": "proof", "text": text, **verdict})


@dataclass
class _LiveStep:
    """A step whose gradients are reduced.

    Attributes:
        batch_number: of the global batch, from 0.
        plain_targets: targets of the step, counted by the definition of the data.
    """

    number: int
    batch_number: int
    sketches: OutputSketches
    computed: ComputedStep
    totals: StepTotals
    plain_targets: int = 0

    @property
    def loss(self) -> float:
        """The logged loss."""
        return self.totals.loss

    @property
    def norm(self) -> float:
        """The logged gradient norm."""
        return self.totals.grad_norm / self.computed.scale

    @property
    def targets(self) -> int:
        """The logged number of targets."""
        return self.totals.targets

    @property
    def is_finite(self) -> bool:
        """Whether there are numbers to compare."""
        return bool(torch.isfinite(torch.tensor([self.loss, self.norm])).all())


def verdict_text(verdict: Mapping[str, Any], before: Mapping[str, Any], *, is_first: bool) -> str:
    """The line of a verdict: what was compared, and what was not."""
    step = "this run's first step" if is_first else f"step {verdict['step']}"
    num = verdict["sequences"]
    num_gradients, total = verdict["gradients"], verdict["all_gradients"]
    share = f"all {total}" if num_gradients == total else f"{num_gradients} of {total}"
    if verdict["projected_gradients"]:
        share = f"{share} gradients, {verdict['projected_gradients']} of them as wholes"
    else:
        share = f"{share} gradients"
    covered = [f"{num} of {counted(num, 'sequence')}", f"{verdict['tokens']:,} tokens", share]
    text = f"proved equal: {step} ({', '.join(covered)}; {verdict['seconds']:.1f} s)"
    if is_first and before.get("verdict") == "equal":
        text = f"{text}, and {before['compared']:,} tensors at reduced size"
    elif is_first and before:
        text = f"{text}; not proved at reduced size: {before.get('reason', '')}"
    if is_first and before.get("verdict") != "equal":
        text = f"{text}; not compared: updates, saves"
    for note in verdict["notes"]:
        text = f"{text}; {note}"
    return text


def _not_compared(number: int, reason: str) -> Event:
    text = f"step {number} was not compared with one device: {reason}"
    return {"event": "proof", "verdict": "unknown", "step": number, "reason": reason, "text": text}


def _different(number: int, reason: str) -> Event:
    """The record of a wrong step; without a text, since the error that ends the run is shown."""
    return {"event": "proof", "verdict": "different", "step": number, "reason": reason, "text": ""}


def _ignore(computed: ComputedStep, totals: StepTotals) -> None:
    """Compare nothing."""
