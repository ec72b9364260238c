"""Owns what the events of a run add up to so far: facts, the last step, the course of the loss, the time left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.view.quantity import count, memory, short_time

Event = Mapping[str, Any]
"""A flat record with an "event" key; `weft.train.event_log` lists the kinds."""

RECENT = 20
"""Steps over which the time of a step is averaged."""


class View(Protocol):
    """Somebody who watches a run."""

    def handle(self, event: Event) -> None:
        """Show what happened."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


@dataclass
class Progress:
    """A run as far as its events have told it."""

    run: Event = field(default_factory=dict)
    step: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def take(self, event: Event) -> None:
        """Add one event; kinds that are not known change nothing."""
        match event.get("event"):
            case "run":
                self.run = event
            case "end":
                self.end = event
            case "step":
                self._take_step(event)

    def _take_step(self, event: Event) -> None:
        if len(self.losses) == 1:
            self.recent_s.clear()  # the first step warms caches and tells nothing of the others
        self.step = event
        self.losses.append(float(event.get("loss", "nan")))
        self.recent_s.append(float(event.get("step_s", "nan")))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0 when nobody said."""
        return int(self.run.get("steps", 0))

    @property
    def num_done(self) -> int:
        """Steps finished, counting those before a resume: the first step is number 1."""
        return int(self.step["step"] if self.step else self.run.get("start_step", 0))

    @property
    def step_s(self) -> float:
        """Mean time of the last steps, seconds; nan before the first."""
        return sum(self.recent_s) / len(self.recent_s) if self.recent_s else float("nan")

    @property
    def left_s(self) -> float:
        """Time the remaining steps will take if they go on like the last ones, seconds; predicted."""
        return max(self.num_steps - self.num_done, 0) * self.step_s

    @property
    def mem_bytes(self) -> tuple[float, ...]:
        """Memory of every stage, or of the one there is; measured."""
        sizes = self.step.get("stage_mem_bytes", self.step.get("mem_bytes", ()))
        return tuple(sizes) if isinstance(sizes, (list, tuple)) else (sizes,)


def _layout(run: Event) -> str:
    return f"{run['layout']}, {run['ranks']} ranks" if run.get("ranks", 1) > 1 else str(run["layout"])


def _model(run: Event) -> str:
    return f"{run['model']}, {count(run['params'])} parameters" if "params" in run else str(run["model"])


def _data(run: Event) -> str:
    data = run["data"]
    if not isinstance(data, Mapping):
        return str(data)
    amounts = (
        f"{count(n)} {key}" if isinstance(n, int) else f"{key} {n}"
        for key, n in data.items()
        if key != "source" and not isinstance(n, Mapping)
    )
    return ", ".join((str(data.get("source", "data")), *amounts))


def _step_size(run: Event) -> str:
    batch, length = run["batch_size"], run.get("seq_len")
    return f"{batch} sequences x {length} tokens = {count(batch * length)} tokens" if length else f"{batch} samples"


FACTS: dict[str, tuple[str, Callable[[Event], str]]] = {
    "layout": ("layout", _layout),
    "schedule": ("schedule", lambda run: str(run["schedule"])),
    "device": ("device", lambda run: str(run["device"])),
    "model": ("model", _model),
    "data": ("data", _data),
    "a step": ("batch_size", _step_size),
    "optimizer": ("optimizer", lambda run: str(run["optimizer"])),
    "output": ("out", lambda run: str(run["out"])),
}
"""Label -> the key that must be there, and how the run event says it."""


def facts(run: Event) -> tuple[tuple[str, str], ...]:
    """What the run event tells about the run, as label and text."""
    return tuple((label, say(run)) for label, (key, say) in FACTS.items() if run.get(key) not in (None, ""))


def words_of(event: Event) -> str:
    """What an event says in words, as lines to print once; "" for those that say nothing."""
    match event.get("event"):
        case "run":
            return str(event.get("why", ""))
        case "eval":
            found = f"loss {event.get('loss', float('nan')):.4f} nats, perplexity {event.get('perplexity', float('nan')):,.2f}"
            return f"evaluated after step {event.get('step')}: {found}, {event.get('tokens', 0):,} tokens"
        case "note":
            return str(event.get("text", ""))
        case "save" | "save_failed" | "resume":
            return checkpoint_words(event)
        case "sample":
            return f"the model goes on after {event.get('prompt', '')!r}:\n{event.get('prompt', '')}{event.get('text', '')}"
    return ""


def checkpoint_words(event: Event) -> str:
    """What happened to a checkpoint, in one line; a resume adds one for each that it passed over."""
    step, path = event.get("step"), event.get("path")
    match event.get("event"):
        case "save":
            size, stall, write = memory(event["bytes"]), short_time(event["stall_s"]), short_time(event["write_s"])
            return f"saved step {step}: {path}, {size}, training stood still for {stall}, on the disk after {write}"
        case "save_failed":
            need, free = memory(event["need_bytes"]), memory(event["free_bytes"])
            newest = f"the newest checkpoint is {event['newest']}" if event.get("newest") else "there is no checkpoint"
            why = f"{need} needed, {free} free; {event['why']}"
            return f"warning: step {step} is not saved ({why}). Training goes on, {newest}"
    passed_over = [f"passed over: {words}" for words in event.get("passed_over", ())]
    if path is None:
        return "\n".join((*passed_over, "no checkpoint in the run folder yet: the run begins anew"))
    return "\n".join((*passed_over, f"goes on after step {step}: {path}, written by {event.get('layout')}"))


def stages(sizes: tuple[float, ...]) -> str:
    """Memory in words: `312 MiB`, or one size a stage: `stage 0 312 MiB, 1 298 MiB`."""
    if len(sizes) == 1:
        return memory(sizes[0])
    return "stage " + ", ".join(f"{stage} {memory(size)}" for stage, size in enumerate(sizes))


def steps_of(progress: Progress) -> str:
    """`  7/200`, or `7` when nobody said how many there will be."""
    done, total = progress.num_done, progress.num_steps
    return f"{done:>{len(str(total))}}/{total}" if total else str(done)
