"""Generated layouts of every family, proved one after the other: meshes, options, number types, schedules, adapters."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.checks import run_checks
from weft.config.load import try_load
from weft.config.validate import config_checks
from weft.core.dimension import exact_axes
from weft.errors import type_and_message
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.small_sizes import small_words
from weft.prove.subject import ProofCase, reduced_case
from weft.schedule.catalog import SCHEDULES

USER_MODEL = "weft.prove.user_model"
MOST_RANKS = (2, 4, 4, 8)
"""Of a mesh: one of these."""
DEGREES = (1, 1, 1, 2, 2, 4)
"""A degree of an axis is one of these."""
PRECISIONS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    (
        "--precision.params",
        "float64",
        "--precision.compute",
        "float64",
        "--precision.reduce",
        "float64",
    ),
    ("--precision.compute", "bfloat16"),
    ("--precision.compute", "float16"),
)
STEPS = 3


@dataclass(frozen=True)
class SweepResult:
    """The proof of one generated layout, with reduced sizes."""

    case: ProofCase
    report: ProofReport

    @property
    def command(self) -> str:
        """The command that repeats it."""
        return self.case.command

    @property
    def message(self) -> str:
        """The first difference, or the error that ended the layout."""
        first = self.report.first
        return self.report.error or str(first)


def generated_cases(seed: int) -> Iterator[ProofCase]:
    """Cases that config validation accepts, without end, a function of the seed."""
    dice = random.Random(seed)  # noqa: S311 - layouts, not secrets
    families = [name for name, family in FAMILIES.items() if family.Config.kind == "tokens"]
    families.append(USER_MODEL)
    while True:
        words = _words(dice, dice.choice(families))
        loaded = try_load(list(words), FAMILIES)
        faults = run_checks(
            loaded.run,
            config_checks,
            known=loaded.faults,
        )
        if not faults:
            yield reduced_case(loaded.run, STEPS)


def _words(dice: random.Random, family: str) -> tuple[str, ...]:
    words = ["--mesh", _mesh(dice), "--model.name", family]
    if family != USER_MODEL:  # small as it is
        words += small_words(family)
    options = {
        "--data.seq_len": ("16", "24"),
        "--data.packing": ("stream", "documents"),
        "--batch.micro_size": ("1", "1", "2"),
        "--batch.global_size": ("8", "16"),
        "--parallel.zero": ("0", "0", "1", "2", "3"),
        "--parallel.sequence": ("False", "True"),
        "--parallel.context": ("ring", "allgather", "ulysses"),
        "--parallel.recompute": ("none", "none", "selective", "full"),
        "--optim.name": ("adamw", "adamw", "adamw", "sgd", "lion", "muon", "adafactor"),
        "--optim.clip": ("0", "0.1", "1"),
        "--optim.warmup": ("0", "4"),
        "--lora.rank": ("0", "0", "0", "3"),
    }
    for key, values in options.items():
        words += (key, dice.choice(values))
    schedule = dice.choice(tuple(SCHEDULES))
    words += ("--pipeline.schedule", schedule)
    words += ("--pipeline.chunks", str(SCHEDULES[schedule].default_chunks))
    words += dice.choice(PRECISIONS)
    words += ("--steps", "6", "--seed", str(dice.randrange(1000)))
    return tuple(words)


def _mesh(dice: random.Random) -> str:
    """A mesh of few ranks, in any nesting."""
    most = dice.choice(MOST_RANKS)
    axes = list(exact_axes())
    dice.shuffle(axes)
    names: list[str] = []
    size = 1
    for axis in axes:
        degree = dice.choice(DEGREES)
        if degree > 1 and size * degree <= most:
            names.append(f"{axis}{degree}")
            size *= degree
    return " ".join(names)


@dataclass(frozen=True)
class SweepSummary:
    """Counts of a sweep."""

    results: Sequence[SweepResult]
    seconds: float

    @property
    def failed(self) -> tuple[SweepResult, ...]:
        """Layouts that differ from one device."""
        return tuple(result for result in self.results if not result.report.holds)

    @property
    def layouts_per_minute(self) -> float:
        """Proofs in a minute, measured."""
        return 60 * len(self.results) / max(self.seconds, 1e-9)

    @property
    def holds(self) -> bool:
        """Whether every layout is equal to one device."""
        return not self.failed

    def to_dict(self, *, seed: int) -> dict[str, Any]:
        """Values for JSON."""
        failed = [{"command": each.command, "message": each.message} for each in self.failed]
        return {
            "layouts": len(self.results),
            "failed": failed,
            "seconds": round(self.seconds, 1),
            "layouts_per_minute": round(self.layouts_per_minute, 1),
            "seed": seed,
        }


def sweep(
    minutes: float,
    *,
    seed: int,
    most: int | None = None,
) -> Iterator[SweepResult]:
    """Prove generated layouts until the time is over, at least one.

    Args:
        most: number of layouts after which it ends, too.
    """
    end = time.monotonic() + 60 * minutes
    for number, case in enumerate(generated_cases(seed), start=1):
        yield SweepResult(case, _proof(case))
        if time.monotonic() >= end or number == most:
            return


def _proof(case: ProofCase) -> ProofReport:
    """The report; of an error that is none of the layout's own, too."""
    try:
        return prove(case.opened())
    except Exception as error:  # noqa: BLE001 - the sweep goes on
        return ProofReport.of_error(
            type_and_message(error),
            layout=case.mesh.text,
            model=case.family_name,
            steps=case.steps,
        )
