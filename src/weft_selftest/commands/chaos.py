"""`weft chaos`: inject faults into runs of a tiny model on several layouts, and compare with runs without. Imports no torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import Field

from weft.commands.console import print_result, show_help, take_flag, wants_help
from weft.config import flags
from weft.config.schema import ConfigSection
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError, did_you_mean
from weft.run.rank_status import Phase
from weft.start.checked_run import set_openmp_policy
from weft_selftest.chaos.chaos_layout import LAYOUTS, ChaosLayout
from weft_selftest.chaos.chaos_report import ChaosReport, TrialResult
from weft_selftest.chaos.fault_plan import FAULT_KINDS, FAULT_PHASES, FaultKind, deal
from weft_selftest.entries import CHAOS

NAME = "weft chaos"

Claim = Literal["bit_identical", "no_hang", "survived", "injected", "no_needless_restart"]
CLAIMS: tuple[Claim, ...] = get_args(Claim)

TEXT = "the quick brown fox jumps over the lazy dog. " * 400
"""The training data."""

T = TypeVar("T", bound=str)


class ChaosOptions(ConfigSection):
    """Which faults are injected, and where."""

    faults: int = Field(
        24,
        ge=1,
        le=100_000,
        description="number of faults over all layouts",
    )
    kinds: str = Field("", description=f"of {', '.join(FAULT_KINDS)}; empty: all")
    phases: str = Field("", description=f"of {', '.join(FAULT_PHASES)}; empty: all")
    layout: str = Field(
        "", description="mesh, with zero1 to zero3, and moe for a mixture of experts; repeatable"
    )
    seed: int = Field(
        0,
        ge=0,
        description="of the choice of faults, ranks and order",
    )
    claims: str = Field(
        ",".join(CLAIMS),
        description=f"exit code 1 unless they hold (or --assert): {', '.join(CLAIMS)}",
    )
    format: Literal["text", "json"] = Field(
        "text", description="json: one object; --json for short"
    )


def chaos(words: Sequence[str]) -> int:
    """Inject faults, compare and report; exit code 1 where a claim does not hold."""
    if wants_help(words):
        return show_help(ChaosOptions(), f"{NAME} {CHAOS.usage}", CHAOS.line)
    layout_texts, rest = _take_layouts(words)
    if rest and rest[0].endswith(".toml"):
        config = [rest.pop(0)]
    else:
        config = []
    option_words: list[str] = []
    for word in rest:
        option_words += ("--format", "json") if word == "--json" else (word,)
    option_words = ["--claims" if word == "--assert" else word for word in option_words]
    options = flags.read_config(option_words, ChaosOptions)
    kinds: tuple[FaultKind, ...] = _choices("kinds", options.kinds, FAULT_KINDS)
    phases: tuple[Phase, ...] = _choices("phases", options.phases, FAULT_PHASES)
    claims: tuple[Claim, ...] = _choices("assert", options.claims, CLAIMS)
    if options.layout:  # written as --layout=dp3
        layout_texts.append(options.layout)
    layouts = [ChaosLayout.parse(text) for text in layout_texts or LAYOUTS]
    dealt = deal(
        options.faults,
        kinds=kinds,
        phases=phases,
        finds_corruption=[layout.finds_corruption for layout in layouts],
        seed=options.seed,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_openmp_policy()
    from weft_selftest.chaos.chaos_trial import (
        run_trial,  # imports torch, and so comes after all checks
    )

    results: list[TrialResult] = []
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as name:
        folder = Path(name)
        source = folder / "text.txt"
        source.write_text(TEXT, encoding="ascii")
        for number, (layout, cells) in enumerate(zip(layouts, dealt, strict=True)):
            if not cells:
                continue
            trial = run_trial(
                layout,
                cells,
                partial(layout.words, config=config, source=source),
                folder=folder / f"layout{number}",
                seed=options.seed + number,
                source=None if config else source,
            )
            results.append(trial)
            if options.format == "text":
                print_result(trial.line())
    report = ChaosReport(
        num_faults=options.faults,
        seed=options.seed,
        trials=tuple(results),
    )
    if options.format == "json":
        print_result(json.dumps(report.to_json(claims)))
    else:
        print_result("\n".join(report.lines(claims)))
    if all(report.holds(claim) for claim in claims):
        return EXIT_OK
    return EXIT_FAILED


def _take_layouts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of every `--layout`, and all other words."""
    layouts: list[str] = []
    rest = list(words)
    while "--layout" in rest:
        flag, rest = take_flag("--layout", rest)
        if len(flag) < 2:
            raise UserError(Fault("layout", "has no value", fix='--layout "dp3 zero3"'))
        layouts.append(flag[1])
    return layouts, rest


def _choices(key: str, text: str, known: Sequence[T]) -> tuple[T, ...]:
    """The names in a list separated by commas; all of them if it is empty.

    Raises:
        UserError: a name is unknown.
    """
    given = text.replace(",", " ").split()
    for name in given:
        if name not in known:
            raise UserError(
                Fault(
                    key,
                    "is unknown",
                    got=repr(name),
                    need=", ".join(known),
                    fix=did_you_mean(name, known),
                )
            )
    return tuple(name for name in known if name in given or not given)
