"""The history of a run, filled event by event: numbers of steps as compact columns, of other events what a page shows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

COLUMNS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_s",
    "step_s",
    "mfu",
    "mem_bytes",
    "expert_load",
    "rewards_chosen",
    "rewards_rejected",
    "rewards_margins",
    "rewards_accuracies",
    "z0",
)
"""Numbers of a step event; NaN where a step has none."""
MARKED = ("guard", "restart", "resume", "save", "save_failed", "note")
"""Kinds of events that are listed."""
MAX_STEP = 2**63 - 1
MOST_SAMPLES = 200
"""Texts that are kept, those of the last steps."""
MOST_MEASURED = 1000
"""Measurements of blocks that are kept; of more every other one."""
MAX_STAGES = 4096
"""Columns of memory: more stages than any run has."""


class RunHistory:
    """What the events of a run so far amount to; a step takes about a hundred bytes.

    Attributes:
        start: the last `run` event.
        last: the last event of any kind.
        prediction: the last event of its kind; empty where there is none.
        steps: number of each step, without those that a resume went back behind.
        columns: by the names of `COLUMNS`, a value for each step.
        stages: measured memory, a column for each stage.
        num_trained: how many step events there were, repeated ones too.
        marked: the events that are listed, each with the number of steps done before it.
        evaluations: step -> loss, the newest of each step.
        proofs: those since the last start.
        samples: step -> event, the newest of each step, of the last MOST_SAMPLES steps.
        blocks: step -> event with numbers of the blocks, MOST_MEASURED at most.
    """

    def __init__(self) -> None:
        self.start: Event = {}
        self.last: Event = {}
        self.prediction: Event = {}
        self.steps = array("q")
        self.columns = {name: array("d") for name in COLUMNS}
        self.stages: list[array[float]] = []
        self.num_trained = 0
        self.marked: list[tuple[int, Event]] = []
        self.evaluations: dict[int, float] = {}
        self.proofs: list[Event] = []
        self.samples: dict[float, Event] = {}
        self.blocks: dict[int, Event] = {}
        self._done = 0

    def add(self, event: Event) -> None:
        """Add the next event of the run.

        Raises:
            ValueError: its step is a number that no run reaches.
        """
        kind, step = event["event"], event.get("step", 0)
        if step > MAX_STEP:
            raise ValueError(f"step {step} is too large")
        self.last = event
        if kind in ("step", "resume", "restart"):
            self._done = event.get("step", self._done)
        if kind in MARKED or (kind == "step" and event.get("skipped")):
            self.marked.append((self._done, event))
        match kind:
            case "run":
                self.start, self.proofs = event, []
            case "resume" | "restart":
                self._go_back(step)
            case "step":
                self._add_step(event, step)
            case "eval":
                self.evaluations[step] = number(event.get("loss"))
            case "proof":
                self.proofs.append(event)
            case "sample":
                self.samples[number(event.get("step", math.inf))] = event
                if len(self.samples) > MOST_SAMPLES:
                    del self.samples[min(self.samples)]
            case "blocks":
                self.blocks[step] = event
                if len(self.blocks) > MOST_MEASURED:
                    kept = sorted(self.blocks)[::2]
                    self.blocks = {step: self.blocks[step] for step in kept}
            case "prediction":
                self.prediction = event

    def _add_step(self, event: Event, step: int) -> None:
        self.num_trained += 1
        for name, column in self.columns.items():
            column.append(number(event.get(name)))
        row = event.get("stage_mem_bytes")
        values = [number(each) for each in row[:MAX_STAGES]] if isinstance(row, list) else []
        for _ in range(len(self.stages), len(values)):
            self.stages.append(array("d", [math.nan]) * len(self.steps))
        self.steps.append(step)
        padded = values + [math.nan] * (len(self.stages) - len(values))
        for stage, value in zip(self.stages, padded, strict=True):
            stage.append(value)

    def _go_back(self, last_kept: int) -> None:
        """Leave out the steps behind one that is trained again."""
        self.blocks = {step: event for step, event in self.blocks.items() if step <= last_kept}
        self.samples = {step: event for step, event in self.samples.items() if step <= last_kept}
        self.evaluations = {
            step: loss for step, loss in self.evaluations.items() if step <= last_kept
        }
        kept = [at for at, step in enumerate(self.steps) if step <= last_kept]
        if len(kept) == len(self.steps):
            return
        self.steps = array("q", _chosen(self.steps, kept))
        self.columns = {
            name: array("d", _chosen(column, kept)) for name, column in self.columns.items()
        }
        self.stages = [array("d", _chosen(stage, kept)) for stage in self.stages]
        while self.stages and all(map(math.isnan, self.stages[-1])):
            self.stages.pop()


def number(value: Any) -> float:
    """The value of a field as a number; NaN where it is none."""
    return float(value) if type(value) in (int, float) else math.nan


def _chosen(values: Sequence[Any], places: Sequence[int]) -> Iterator[Any]:
    return (values[place] for place in places)
