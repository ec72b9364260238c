"""Tiny runs on a text with one bad sample, a block that fails on it, and the losses of one device on chosen batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.one_device import GivenSamples
from tests.tiny_run import TINY
from weft.config.load import load
from weft.config.run import Run
from weft.data.dataset import open_data
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.prove.proof import reference
from weft.prove.subject import Subject
from weft.train import build_training
from weft.train.data_loader import samples_of, whole_batch
from weft.train.event_lines import read_events, step_history
from weft.train.event_log import EVENTS

MARKER = 7
"""The byte of one sample that makes a block return NaN, or a loss that is far too large."""
LR = 3e-3
TOLERANCE = 1e-9
KEYS = (
    *TINY,
    *("--optim.warmup", "0", "--optim.decay", "constant", "--optim.lr", str(LR)),
    *("--precision.params", "float64", "--precision.compute", "float64"),
    *("--precision.reduce", "float64"),
)


def write_text(folder: Path) -> Path:
    """A text with the marker in one sentence."""
    path = folder / "text.txt"
    sentences = [f"the quick brown fox jumps over {number} lazy dogs. " for number in range(60)]
    sentences[14] = chr(MARKER) * 4 + sentences[14]
    path.write_text("".join(sentences))
    return path


def words_of(text: Path, out: Path, *words: str) -> list[str]:
    return [*KEYS, "--data.source", str(text), "--out", str(out), *words]


def events_of(out: Path) -> list[dict[str, Any]]:
    return list(read_events(out / EVENTS))


def run_of(text: Path, *words: str) -> Run:
    return load(words_of(text, Path("unused"), *words), FAMILIES)


def whole_batches(run: Run, numbers: Sequence[int]) -> list[Batch]:
    samples = open_data(run.data, run.model)
    batches = []
    for number in numbers:
        chosen = samples_of(samples, number, global_size=run.batch.global_size, seed=run.seed)
        batches.append(whole_batch(samples, chosen, later=False))
    return batches


def bad_batch(run: Run) -> int:
    """Number of the first batch with the marker."""
    for number, batch in enumerate(whole_batches(run, range(200))):
        if (batch.inputs == MARKER).any():
            return number
    raise AssertionError("no batch holds the marker")


def one_device_losses(run: Run, numbers: Sequence[int]) -> list[float]:
    """Losses of one device that trains on these batches."""
    samples = GivenSamples(tuple(whole_batches(run, numbers)))
    subject = Subject(run, FAMILIES[run.model.name], samples, steps=len(numbers))
    trace = reference(subject, records=False).run_all(subject.steps)
    return [trace.values[step, "loss", "loss"].item() for step in range(1, subject.steps + 1)]


def spoil(monkeypatch: pytest.MonkeyPatch, block: str, factor: float, token: int = MARKER) -> None:
    """Multiply what `block` returns for micro-batches with `token`, in every run from here on."""
    build_step = build_training.build_step

    def hook(_module: nn.Module, args: tuple[Tensor, Batch], output: Tensor) -> Tensor:
        has_token = bool((args[1].inputs == token).any())
        if has_token:
            return output * factor
        return output

    def spoiled(*args: Any, **options: Any) -> Any:
        step = build_step(*args, **options)
        if block in step.model.blocks:
            step.model.blocks[block].register_forward_hook(hook)
        return step

    monkeypatch.setattr(build_training, "build_step", spoiled)


def assert_losses(out: Path, expected: Sequence[float]) -> None:
    losses = [event["loss"] for event in step_history(events_of(out))]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
