"""`weft chaos`: inject faults into runs of a tiny model on several layouts, and compare with runs without. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import Field

from weft.commands.console import check_files, print_json, print_result, show_help, wants_help
from weft.config.command_options import JsonOptions, read_options
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


class ChaosOptions(JsonOptions):
    """Which faults are injected, and where."""

    faults: int = Field(24, ge=1, le=100_000, description="number of faults over all layouts")
    kinds: str = Field("", description=f"of {', '.join(FAULT_KINDS)}; empty: all")
    phases: str = Field("", description=f"of {', '.join(FAULT_PHASES)}; empty: all")
    layout: tuple[str, ...] = Field(
        (), description="meshes, with zero1 to zero3, and moe for a mixture of experts"
    )
    seed: int = Field(0, ge=0, description="of the choice of faults, ranks and order")
    claims: str = Field(
        ",".join(CLAIMS),
        description=f"exit code 1 unless they hold (or --assert): {', '.join(CLAIMS)}",
    )


def chaos(words: Sequence[str]) -> int:
    """Inject faults, compare and report; exit code 1 where a claim does not hold."""
    if wants_help(words):
        return show_help(ChaosOptions(), f"{NAME} {CHAOS.usage}", CHAOS.line)
    written_out = ["--claims" if word == "--assert" else word for word in words]
    options, config = read_options(written_out, ChaosOptions)
    check_files(options, "json")
    if len(config) > 1 or not all(word.endswith(".toml") for word in config):
        got = " ".join(config)
        raise UserError(Fault(NAME, "takes one config file", got=got, fix=f"{NAME} run.toml"))
    kinds: tuple[FaultKind, ...] = _choices("kinds", options.kinds, FAULT_KINDS)
    phases: tuple[Phase, ...] = _choices("phases", options.phases, FAULT_PHASES)
    claims: tuple[Claim, ...] = _choices("assert", options.claims, CLAIMS)
    if "layout" in options.model_fields_set and not options.layout:
        raise UserError(Fault("layout", "has no value", fix='--layout "dp3 zero3"'))
    layouts = [ChaosLayout.parse(text) for text in options.layout or LAYOUTS]
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
            if options.json is None:
                print_result(trial.line())
    report = ChaosReport(num_faults=options.faults, seed=options.seed, trials=tuple(results))
    if options.json is not None:
        print_json(options.json, report.to_json(claims))
    else:
        print_result("\n".join(report.lines(claims)))
    if all(report.holds(claim) for claim in claims):
        return EXIT_OK
    return EXIT_FAILED


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
