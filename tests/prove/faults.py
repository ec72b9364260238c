"""Runs that are proved in tests, and faults planted in the code that trains them."""

from __future__ import annotations

import shlex
from typing import Any

from weft.config.load import load
from weft.config.run import Run
from weft.config.small_runs import reduced
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.small_sizes import accepts_sizes
from weft.prove.subject import Subject

FLOAT64 = "--precision.params float64 --precision.compute float64 --precision.reduce float64"


def small_run(words: str) -> Run:
    """The run of these flags, at reduced size."""
    return reduced(load(shlex.split(words), FAMILIES), accepts_sizes)


def report_of(words: str, *, steps: int = 3) -> ProofReport:
    """The proof of these flags at reduced size, without a search for the smallest case."""
    return prove(Subject.of(small_run(words), steps=steps))


def unchanged(x: Any, *_: Any, **__: Any) -> Any:
    """The first argument."""
    return x
