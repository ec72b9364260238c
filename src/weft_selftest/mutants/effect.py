"""What a layout trains: losses, norms, parameters and moments of some steps, a save and a resumption; for comparing two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.errors import type_and_message
from weft.prove.bounds import largest_difference
from weft.prove.stored import stored_tensors
from weft.prove.subject import ProofCase
from weft.run.run_ranks import run_ranks
from weft.train.event_log import EventLog
from weft.train.loop import run_training
from weft.train.training import Event, Training
from weft_selftest.mutants.fault import ROW_FILES, MutantLayout

TIMEOUT_S = 120.0
STEPS_BEFORE = 2
STEPS = 4
NUMBERS = ("loss", "grad_norm", "lr", "tokens")
MIN_CHANGE = {"float64": 1e-9, "float32": 1e-6, "bfloat16": 1e-6, "float16": 1e-6}
"""Relative changes of trained numbers that are an effect, by compute dtype."""


@dataclass
class EventCollector:
    """A view that keeps the events of steps and evaluations."""

    events: list[Event] = field(default_factory=list)

    def handle(self, event: Mapping[str, Any]) -> None:
        """Keep steps and evaluations."""
        if event["event"] in ("step", "eval"):
            self.events.append(dict(event))

    def close(self) -> None:
        """Do nothing: no file is open."""


@dataclass(frozen=True)
class TrainedNumbers:
    """Numbers and tensors of all ranks by name; or the error that ended the run."""

    tensors: Mapping[str, Tensor]
    error: str = ""


def trained_numbers(case: ProofCase, folder: Path) -> TrainedNumbers:
    """Train the run of a case, save, resume and train on; ranks are threads.

    Args:
        folder: empty; receives the run folder.
    """
    out = folder / "run"
    saved_at_end = {"out": str(out), "save.at_end": True, "save.every": 0, "save.wait_s": 0.0}
    parts: dict[str, dict[str, Any]] = {
        "first": {"steps": STEPS_BEFORE},
        "resumed": {"steps": STEPS, "resume": "auto"},
    }
    tensors: dict[str, Tensor] = {}
    try:
        for part, values in parts.items():
            build = case.training({**saved_at_end, **values})
            for name, tensor in _trained_and_stored(build, case.mesh, out):
                tensors[f"{part} {name}"] = tensor
    except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
        return TrainedNumbers(tensors, type_and_message(error))
    return TrainedNumbers(tensors)


def _trained_and_stored(
    build: Callable[[Comm], Training], mesh: Mesh, out: Path
) -> Iterator[tuple[str, Tensor]]:
    """What all ranks compute in a run, then what its checkpoints hold, by name."""
    found_by_rank = run_ranks(mesh, RankRun(build), timeout_s=TIMEOUT_S)
    for rank, found in enumerate(found_by_rank):
        for name, tensor in found.items():
            yield f"rank {rank} {name}", tensor
    for _, name, tensor in stored_tensors(out):
        yield f"stored {name}", tensor


@dataclass(frozen=True)
class RankRun:
    """Trains a run on one rank; returns the numbers of its steps, its parameters and moments."""

    build: Callable[[Comm], Training]

    def __call__(self, comm: Comm) -> dict[str, Tensor]:
        collector = EventCollector()
        training = self.build(comm)
        with EventLog(None, [collector]) as log:
            run_training(training, log)
        return {**_event_numbers(collector.events), **_state(training)}


def _event_numbers(events: list[Event]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for event in events:
        for name in NUMBERS:
            if name in event:
                key = f"{event['event']} {event['step']} {name}"
                found[key] = torch.tensor(float(event[name]), dtype=torch.float64)
    return found


def _state(training: Training) -> dict[str, Tensor]:
    grads = training.step.grads
    found = {name: value.clone() for name, value in grads.full_parameters().items()}
    optimizer: Any = training.step.optimizer
    for name, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{key} {name}"] = value.clone()
    return found


def changed_numbers(healthy: TrainedNumbers, planted: TrainedNumbers, *, dtype: str) -> str:
    """The number that the mutant changes most, as text; "" if it changes none.

    Args:
        dtype: in which the layout computes.
    """
    if planted.error:
        return planted.error
    least = MIN_CHANGE[dtype]
    largest_change = least
    most_changed = ""
    for name, right in healthy.tensors.items():
        change = _change(planted.tensors[name], right)
        if change > largest_change:
            largest_change = change
            most_changed = name
    if not most_changed:
        return ""
    return f"{most_changed} by {largest_change:.1e}"


def _change(value: Tensor, right: Tensor) -> float:
    if value.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    scale = max(float(right.double().abs().max()), 1e-12)
    return largest_difference(value, right) / scale


def layout_words(
    layout: MutantLayout, folder: Path, *, types: Literal["float64", "own"] = "float64"
) -> tuple[str, ...]:
    """Arguments for the layout, with data files in `folder`."""
    stream, documents = str(folder / STREAM), str(folder / DOCUMENTS)
    return layout.words(stream=stream, documents=documents, types=types)


def user_words(layout: MutantLayout, folder: Path) -> tuple[str, ...]:
    """Arguments for a user's run of the layout, likewise."""
    return layout.user_words(stream=str(folder / STREAM), documents=str(folder / DOCUMENTS))


STREAM = "stream.txt"
DOCUMENTS = "documents.jsonl"
NUM_DOCUMENTS = 400
NUM_IDS = 4096
MOST_IDS = 40_000
"""More than 15 bits hold."""
ALPHABET = "abcdefghijklm nopqrstuvwxyz äöüßéñçåøæŁżπ€字Я"
"""In UTF-8, so that bytes lie in all parts of the vocabulary."""


def write_texts(folder: Path) -> None:
    """Write a stream of text, and short documents of different lengths; always the same bytes."""
    generator = torch.Generator().manual_seed(5)
    documents = [_random_text(generator) for _ in range(NUM_DOCUMENTS)]
    stream = " ".join(documents)
    (folder / STREAM).write_text(stream, encoding="utf-8")
    lines = [f'{{"text": "{text}"}}\n' for text in documents]
    (folder / DOCUMENTS).write_text("".join(lines), encoding="utf-8")
    turns = [
        _chat(question, answer)
        for question, answer in zip(documents[::2], documents[1::2], strict=True)
    ]
    (folder / ROW_FILES["chat"][0]).write_text("".join(turns), encoding="utf-8")
    ids = torch.randint(0, MOST_IDS, (NUM_IDS,), generator=generator)
    (folder / ROW_FILES["ids"][0]).write_bytes(ids.to(torch.uint16).numpy().tobytes())


def _chat(question: str, answer: str) -> str:
    """A line with two turns."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


def _random_text(generator: torch.Generator) -> str:
    """2 to 15 letters of the alphabet."""
    length = int(torch.randint(2, 16, (), generator=generator))
    letters = torch.randint(0, len(ALPHABET), (length,), generator=generator)
    return "".join(ALPHABET[letter] for letter in letters.tolist())
