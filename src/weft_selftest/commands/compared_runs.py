"""Generated runs, trained on rank threads of this process, with steps that are compared with one device."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from weft.errors import EXIT_OK, WeftError, first_line
from weft.start.train_run import train
from weft_selftest.generated_runs import OPTIONS, SIZES, Choices, GeneratedRun
from weft_selftest.sweep import ComparedSteps

CHOICES = Choices(
    most_ranks=(2, 2, 4, 4, 8),
    options={
        **OPTIONS,
        "--data.seq_len": ("8", "16", "24"),
        "--batch.global_size": ("4", "4", "8"),
    },
    sizes={**SIZES, "layers": ("2", "2", "3")},
    losses=("cross_entropy",),  # the standard library has no pairs
    steps=(2, 2, 2, 2, 2, 2, 2, 2, 2, 200),
)
"""Small sizes: a run of 2 steps takes about 1.5 CPU-s, one of 200 about 25."""
MANY_STEPS = 20
"""From so many steps on, a quarter of them are compared; otherwise each is."""


def train_compared(generated: GeneratedRun) -> ComparedSteps:
    """Train a run as `weft train` does, without a run folder, and compare its steps."""
    steps = generated.run.steps
    every = steps // 4 if steps >= MANY_STEPS else 1
    values = {"transport": "threads", "out": "", "save.at_end": False, "prove.during": every}
    values["prove.before"] = "never"  # at reduced size: another check of the sweep
    run = generated.run.with_values(values)
    verdicts: dict[int, Mapping[str, Any]] = {}

    def keep(event: Mapping[str, Any], _: object) -> None:
        if event["event"] == "proof":  # the same on every rank
            verdicts[event["step"]] = event

    error = ""
    try:
        with redirect_stdout(io.StringIO()):
            code = train(run, on_event=keep)
        if code != EXIT_OK:
            error = f"exit code {code}"
    except WeftError as raised:
        error = first_line(raised)
    compared = [event for event in verdicts.values() if event["verdict"] == "equal"]
    return ComparedSteps(
        steps=len(compared),
        closest=max((event["closest"] for event in compared), default=0.0),
        error=error,
        command=shlex.join(("weft", "train", *generated.words, "--prove.during", str(every))),
    )
