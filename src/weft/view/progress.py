"""State of a run accumulated from its events (last step, losses, time left), and the texts of events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.core.dimension import pipeline_axis
from weft.errors import counted
from weft.view.quantity import count, memory, short_time

Event = Mapping[str, Any]
"""A flat record with an "event" key; `weft.train.event_log` lists the kinds."""

NUM_RECENT = 20
"""Steps over which the time of a step is averaged."""


class View(Protocol):
    """A display of the events of a run."""

    def handle(self, event: Event) -> None:
        """Show an event."""
        ...

    def close(self) -> None:
        """Show what is pending; no event follows."""
        ...


@dataclass(frozen=True)
class StepSpeed:
    """Time and tokens of one step."""

    step_s: float
    tokens: float


@dataclass
class Progress:
    """What the events of a run so far amount to: the last event of each kind, the losses, the speed.

    Every view shows the speed of the same steps: the last NUM_RECENT, without the first of all.
    """

    run: Event = field(default_factory=dict)
    step: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)
    evaluation: Event = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    recent: deque[StepSpeed] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    total_tokens: float = 0.0
    total_step_s: float = 0.0

    def update(self, event: Event) -> None:
        """Add one event; unknown kinds are ignored."""
        match event.get("event"):
            case "run":
                self.run = event
            case "restart":
                self.run = {"start_step": event["step"], **self.run, "steps": event["steps"]}
            case "end":
                self.end = event
            case "eval":
                self.evaluation = event
            case "step":
                self._add_step(event)

    def _add_step(self, event: Event) -> None:
        is_second = len(self.losses) == 1
        if is_second:
            self.recent.clear()  # the first step warms caches: its time is not typical
        self.step = event
        loss = _as_float(event.get("loss"))
        step_s = _as_float(event.get("step_s"))
        tokens = _as_float(event.get("tokens"))
        self.losses.append(loss)
        self.recent.append(StepSpeed(step_s, tokens=tokens))
        self.total_tokens += tokens
        self.total_step_s += step_s

    @property
    def unit(self) -> str:
        """What the number `tokens` of steps and evaluations counts."""
        return _unit_of(self.run)

    @property
    def evaluation_loss(self) -> float:
        """Loss of the last evaluation; NaN before the first."""
        return _as_float(self.evaluation.get("loss"))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0 if unknown."""
        return int(self.run.get("steps", 0))

    @property
    def num_done(self) -> int:
        """Steps finished, with those before a resume: the first step is number 1."""
        if self.step:
            return int(self.step["step"])
        return int(self.run.get("start_step", 0))

    @property
    def step_s(self) -> float:
        """Mean time of the recent steps, seconds; NaN before the first."""
        if not self.recent:
            return math.nan
        return sum(each.step_s for each in self.recent) / len(self.recent)

    @property
    def tokens_per_s(self) -> float:
        """Speed over the recent steps, those of `step_s`; NaN before the first."""
        seconds = sum(each.step_s for each in self.recent)
        return sum(each.tokens for each in self.recent) / seconds if seconds else math.nan

    @property
    def left_s(self) -> float:
        """Predicted time of the remaining steps, seconds, at the mean time of the recent ones."""
        num_left = max(self.num_steps - self.num_done, 0)
        return num_left * self.step_s

    @property
    def mem_bytes(self) -> tuple[float, ...]:
        """Measured memory of each stage, or of the only one."""
        by_stage = self.step.get("stage_mem_bytes")
        if by_stage is not None:
            return tuple(by_stage)
        if "mem_bytes" in self.step:
            return (self.step["mem_bytes"],)
        return ()


def _as_float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True)
class SummaryRow:
    """One row of the summary of a run.

    Attributes:
        key: the key of the run event without which the row is left out.
        text: formats the row from the run event.
    """

    label: str
    key: str
    text: Callable[[Event], str]


def _layout_text(run: Event) -> str:
    layout = str(run["layout"])
    num_ranks = run.get("ranks", 1)
    if num_ranks == 1:
        return layout
    return f"{layout}, {num_ranks} ranks"


def _model_text(run: Event) -> str:
    if "params" not in run:
        return str(run["model"])
    return f"{run['model']}, {count(run['params'])} parameters"


def _data_text(run: Event) -> str:
    data = run["data"]
    if not isinstance(data, Mapping):
        return str(data)
    parts = [str(data.get("source", "data"))]
    arrays = data.get("arrays")
    if isinstance(arrays, Mapping):
        parts.extend(f"{name} {text}" for name, text in arrays.items())
    for key, value in data.items():
        if key in ("source", "read_as") or isinstance(value, Mapping | list):
            continue
        if isinstance(value, int):
            parts.append(f"{count(value)} {key}")
        else:
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def _read_as_text(run: Event) -> str:
    """What the files of the data were read as; "" where that is not known."""
    data = run["data"]
    return str(data.get("read_as", "")) if isinstance(data, Mapping) else ""


def _has_images(run: Event) -> bool:
    data = run.get("data")
    return isinstance(data, Mapping) and "samples" in data and "tokens" not in data


def _unit_of(run: Event) -> str:
    """`tokens`, `pairs` of a run on preference pairs, `texts` that are classified, `images`; of arrays
    `targets`, or `samples` where each is one target.
    """
    data = run.get("data")
    arrays = data.get("arrays") if isinstance(data, Mapping) else None
    if isinstance(arrays, Mapping):
        return "targets" if "[]" not in str(arrays.get("targets", "[]")) else "samples"
    for unit in ("pairs", "answers", "texts"):
        if isinstance(data, Mapping) and unit in data:
            return unit
    return "images" if _has_images(run) else "tokens"


def loss_unit(unit: str) -> str:
    """What follows the number of a loss: the models of named arrays have losses of any unit.

    Args:
        unit: what a run counts; see `Progress.unit`.
    """
    return "" if unit in ("samples", "targets") else " nats"


def _step_text(run: Event) -> str:
    batch = run["batch_size"]
    if _has_images(run):
        unit = "sample" if _unit_of(run) in ("samples", "targets") else "image"
        return counted(batch, unit)
    length = run.get("seq_len")
    if not length:
        return counted(batch, "sample")
    num_tokens = count(batch * length)
    step = f"{counted(batch, 'sequence')} x {length} tokens = {num_tokens} tokens"
    data = run.get("data")
    num_samples = data.get("samples") if isinstance(data, Mapping) else None
    if not num_samples or not run.get("steps"):
        return step
    epochs = run["steps"] * batch / num_samples
    return f"{step}; {counted(run['steps'], 'step', spec=',')} are {epochs:.2g} epochs"


SUMMARY = (
    SummaryRow("layout", "layout", _layout_text),
    SummaryRow("schedule", "schedule", lambda run: str(run["schedule"])),
    SummaryRow("device", "device", lambda run: str(run["device"])),
    SummaryRow("model", "model", _model_text),
    SummaryRow("data", "data", _data_text),
    SummaryRow("read as", "data", _read_as_text),
    SummaryRow("a step", "batch_size", _step_text),
    SummaryRow("optimizer", "optimizer", lambda run: str(run["optimizer"])),
    SummaryRow("output", "out", lambda run: str(run["out"])),
)


def run_summary(run: Event) -> list[tuple[str, str]]:
    """Label and text of each row that the run event has values for."""
    rows: list[tuple[str, str]] = []
    for row in SUMMARY:
        value = run.get(row.key)
        has_value = value is not None and value != ""
        if has_value:
            text = row.text(run)
            if text:
                rows.append((row.label, text))
    return rows


def event_text(event: Event, *, unit: str = "tokens") -> str:
    """The lines to print once for an event; "" for kinds that only change the progress.

    Args:
        unit: what evaluations count.
    """
    match event.get("event"):
        case "run":
            return _layout_reasons(event)
        case "step":
            return _overflow_text(event)
        case "eval":
            return _eval_text(event, unit)
        case "note" | "guard" | "proof" | "prediction" | "end":
            return str(event.get("text", ""))
        case "save":
            return _save_text(event)
        case "save_failed":
            return _save_failed_text(event)
        case "resume":
            return _resume_text(event)
        case "restart":
            return _restart_text(event)
        case "sample":
            return _sample_text(event)
    return ""


def _sample_text(event: Event) -> str:
    """A text that the model has generated, below its step and prompt."""
    prompt = event.get("prompt", "")
    step = event.get("step")
    at = f"sample of step {step}" if step else "sample"
    return f"{at} after the prompt {prompt!r}:\n{prompt}{event.get('text', '')}"


def _layout_reasons(run: Event) -> str:
    """The reasons of a layout, without the line that names it: a row of the summary does."""
    text = str(run.get("why", ""))
    first, _, rest = text.partition("\n")
    return rest if first.startswith(f"mesh {run.get('layout')}: ") else text


def _overflow_text(event: Event) -> str:
    """That a step was skipped because its float16 gradients overflowed; "" for other steps, of which
    a guard has its own event.
    """
    scale = event.get("loss_scale", 1)
    loss = event.get("loss", math.nan)
    is_overflow = event.get("skipped") and scale != 1 and math.isfinite(loss)
    if not is_overflow:
        return ""
    return (
        f"step {event.get('step')} skipped: float16 gradients overflow at loss scale {scale:,.10g}; "
        f"the next step has {scale / 2:,.10g}"
    )


def _eval_text(event: Event, unit: str) -> str:
    step = event.get("step")
    loss = event.get("loss", math.nan)
    results = [f"loss {loss:.4f}{loss_unit(unit)}"]
    if "perplexity" in event:
        results.append(f"perplexity {event['perplexity']:,.2f}")
    if "accuracy" in event:
        results.append(f"accuracy {event['accuracy']:.1%}")
    elif "rewards_accuracies" in event:
        results.append(f"right {event['rewards_accuracies']:.1%}")
    count_of_unit = event.get("tokens", 0)
    results.append(f"{count_of_unit:,} {unit}")
    return f"evaluated after step {step}: {', '.join(results)}"


def _save_text(event: Event) -> str:
    step = event.get("step")
    path = event.get("path")
    size = memory(event["bytes"])
    stall = short_time(event["stall_s"])
    write = short_time(event["write_s"])
    parts = [f"saved step {step}: {path}", size, f"training stalled {stall}", f"written in {write}"]
    return ", ".join(parts)


def _save_failed_text(event: Event) -> str:
    need = memory(event["need_bytes"])
    free = memory(event["free_bytes"])
    why = event["why"]
    step = event.get("step")
    warning = f"warning: step {step} is not saved ({need} needed, {free} free; {why})"
    newest = event.get("newest")
    if event.get("is_last"):
        return warning
    if newest:
        return f"{warning}. Training continues; the newest checkpoint is {newest}"
    return f"{warning}. Training continues; there is no checkpoint"


def _resume_text(event: Event) -> str:
    """The checkpoint that is resumed, below the newer ones that were skipped."""
    lines = [f"skipped: {fault}" for fault in event.get("passed_over", ())]
    path = event.get("path")
    if path is None:
        lines.append("no checkpoint in the run folder yet: training starts at step 1")
    else:
        step = event.get("step")
        layout = event.get("layout")
        lines.append(f"resumed after step {step}: {path}, written by {layout}")
    return "\n".join(lines)


RESTART_SOURCES = {
    "memory": "the snapshot in memory",
    "checkpoint": "the checkpoint",
    "start": "the start",
}


def _restart_text(event: Event) -> str:
    """`rank 1 (dp1): .... Restart 1 of 3 from the snapshot in memory of step 40, after 1.2 s`."""
    reason = event["reason"]
    attempt = event["attempt"]
    most = event["of"]
    source = RESTART_SOURCES[event["source"]]
    if event["source"] != "start":
        step = event["step"]
        source += f" of step {step}"
    took = short_time(event["detected_s"] + event["recovered_s"])
    return f"{reason}. Restart {attempt} of {most} from {source}, after {took}"


def stage_memory(sizes: tuple[float, ...]) -> str:
    """`312 MiB`, or a size for each pipeline rank: `pp0 312 MiB, pp1 298 MiB`."""
    if len(sizes) == 1:
        return memory(sizes[0])
    axis = pipeline_axis()
    ranks: list[str] = []
    for rank, num_bytes in enumerate(sizes):
        size = memory(num_bytes)
        ranks.append(f"{axis}{rank} {size}")
    return ", ".join(ranks)


def step_count(progress: Progress) -> str:
    """`  7/200`, or `7` if the number of steps is unknown."""
    done = progress.num_done
    total = progress.num_steps
    if not total:
        return str(done)
    width = len(str(total))
    return f"{done:>{width}}/{total}"
