"""The parts of one rank's training run, as records: its steps and learning rates, evaluation, and what acts between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.checkpoint.memory import MemorySnapshots
from weft.checkpoint.saver import Saver
from weft.run.rank_status import OnPhase
from weft.train.best import EvalHistory
from weft.train.block_stats import BlockStats
from weft.train.data_loader import DataLoader
from weft.train.digest import StateDigests
from weft.train.evaluate import Evaluation
from weft.train.guard import StepGuard
from weft.train.loop_texts import MAX_ADVISED_LR
from weft.train.sample_texts import SampleTexts
from weft.train.step import TrainStep
from weft.train.step_check import StepCheck
from weft.train.step_profiler import StepProfiler
from weft.train.straggler import StragglerWatch

Event = dict[str, Any]


@dataclass(frozen=True)
class Evaluator:
    """When to evaluate, and how.

    Attributes:
        history: the losses so far.
        saves_best: whether a new lowest loss is saved.
    """

    evaluation: Evaluation
    every: int
    total_steps: int
    history: EvalHistory = field(default_factory=EvalHistory)
    saves_best: bool = False

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows step `step` (the first is 1)."""
        return step % self.every == 0 or step == self.total_steps


@dataclass(frozen=True)
class StepRange:
    """The steps that a run trains, and their learning rates.

    Attributes:
        start: steps that are done already.
        total: steps of the whole run.
        learning_rate: step (from 0) -> learning rate.
        prefetch: steps whose data is loaded ahead.
    """

    start: int
    total: int
    learning_rate: Callable[[int], float]
    prefetch: int = 0


@dataclass(frozen=True)
class Training:
    """The parts of one rank's training run.

    Attributes:
        save_at_end: whether the last step is saved.
        gc_every: steps between collections of garbage; 0: whenever Python does.
        save_wait_s: how long a disk that does not take it is tried again.
        files: name -> text of the files that describe the run in its folder.
        opening_events: events before the first step.
        guard: judges every step.
        digests: compare the training state of replicas; None: not at all.
        stragglers: reports slow ranks; None: not at all.
        peak_lr: the configured learning rate, for the advice after a non-finite step.
        on_phase: called with the step and the phase whenever this rank begins a phase.
        snapshots: in memory; None if there are none.
        check: compares some steps before their update; None: none.
        samples: texts that the model generates; None: none.
        blocks: measures the blocks of some steps; None: of none.
        profiler: records some steps; None: none.
    """

    step: TrainStep
    loader: DataLoader
    step_range: StepRange
    saver: Saver
    evaluator: Evaluator | None
    save_at_end: bool
    run_folder: Path
    files: Mapping[str, str]
    opening_events: tuple[Event, ...]
    guard: StepGuard
    digests: StateDigests | None = None
    stragglers: StragglerWatch | None = None
    peak_lr: float = MAX_ADVISED_LR
    on_phase: OnPhase | None = None
    snapshots: MemorySnapshots | None = None
    check: StepCheck | None = None
    samples: SampleTexts | None = None
    blocks: BlockStats | None = None
    profiler: StepProfiler | None = None
    save_wait_s: float = 0.0
    gc_every: int = 0
