"""`weft prove --mutants` and `--sweep`: faults that a proof must report, and healthy layouts that it must not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from weft.commands.console import check_files, print_json, print_result, show_help, wants_help
from weft.config.command_options import JsonOptions, OptionsT, read_options
from weft.errors import EXIT_FAILED, EXIT_OK, ConfigError, Fault, UserError
from weft.start.checked_run import set_openmp_policy
from weft_selftest.mutants.names import mutant_names

if TYPE_CHECKING:
    from weft.prove.subject import ProofCase

MUTANTS = "--mutants"
SWEEP = "--sweep"
MAX_MINUTES = 7 * 24 * 60


class MutantOptions(JsonOptions):
    """Which faults are planted."""

    only: str = Field("", description="names of mutants, or parts of them, separated by commas")
    checks: Literal["proof", "each"] = Field(
        "proof",
        description="proof: the first step is compared where the proof holds; each: proof, first step, types",
    )


class SweepOptions(JsonOptions):
    """How many layouts are generated."""

    sweep: float = Field(1.0, gt=0, le=MAX_MINUTES, description="minutes")
    seed: int = Field(0, ge=0, description="of the choice of layouts, families and options")
    checks: Literal["proof", "steps", "each"] = Field(
        "proof",
        description=(
            "proof: at reduced size; steps: each layout is trained (2 steps, one in ten 200), its "
            "steps compared with one device; each: both"
        ),
    )


def prove_mutants(words: Sequence[str]) -> int:
    """Plant mutants one after the other; exit code 1 if a proof does not report one of them."""
    if wants_help(words):
        usage = f"weft prove {MUTANTS} [--only NAME] [--checks each] [--json]"
        return show_help(MutantOptions(), usage, "plant faults, each of which a proof must report")
    rest = [word for word in words if word != MUTANTS]
    options = _options(rest, MutantOptions)
    names = _chosen_names(options.only, mutant_names())
    _prepare_threads()
    from weft_selftest.mutants.all_mutants import all_mutants  # imports torch, after all checks
    from weft_selftest.mutants.table import MutantSummary, result_lines
    from weft_selftest.mutants.trial import MutantResult, try_mutants

    catalog = all_mutants()
    results: list[MutantResult] = []
    chosen = [catalog[name] for name in catalog if name in names]
    types_of = mismatched_types if options.checks == "each" else None
    for result in try_mutants(chosen, types_of=types_of):
        results.append(result)
        if options.json is None:
            print_result("\n".join(result_lines(result)))
    summary = MutantSummary.of(results)
    if options.json is not None:
        found = [result.to_dict() for result in results]
        print_json(options.json, {**summary.to_dict(), "results": found})
    else:
        print_result("\n".join(summary.lines()))
    return EXIT_OK if summary.holds else EXIT_FAILED


def mismatched_types(case: ProofCase) -> tuple[str, ...]:
    """What the types of a run's step say, as `weft explain` prints it."""
    from weft.planner.certificate.certificate import certify  # late: they import torch
    from weft.planner.measure.measured_run import MeasuredRun

    certificate = certify(MeasuredRun.of(case.run))
    return tuple(finding.text for finding in certificate.mismatches)


def prove_sweep(words: Sequence[str]) -> int:
    """Prove generated layouts for some minutes; exit code 1 if one differs from one device."""
    if wants_help(words):
        usage = f"weft prove {SWEEP} MINUTES [--seed N] [--checks steps|each] [--json]"
        return show_help(SweepOptions(), usage, "prove generated layouts of every family")
    options = _options(words, SweepOptions)
    _prepare_threads()
    from weft_selftest.commands.compared_runs import CHOICES, train_compared  # they import torch
    from weft_selftest.generated_runs import Choices
    from weft_selftest.sweep import SweepResult, SweepSummary, sweep

    start = time.monotonic()
    results: list[SweepResult] = []
    for result in sweep(
        options.sweep,
        seed=options.seed,
        choices=Choices() if options.checks == "proof" else CHOICES,
        proves=options.checks != "steps",
        train=None if options.checks == "proof" else train_compared,
    ):
        results.append(result)
        if options.json is None:
            for message in result.messages:
                print_result(f"NOT equal: {message}")
    summary = SweepSummary(results=results, seconds=time.monotonic() - start)
    if options.json is None:
        print_result("\n".join(summary.lines(seed=options.seed)))
    else:
        print_json(options.json, summary.to_dict(seed=options.seed))
    return EXIT_OK if summary.holds else EXIT_FAILED


def _options(words: Sequence[str], of: type[OptionsT]) -> OptionsT:
    options, places = read_options(words, of)
    if places:
        raise ConfigError(
            *(Fault(each, "belongs to no flag", fix="leave it out") for each in places)
        )
    check_files(options, "json")
    return options


def _prepare_threads() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_openmp_policy()


def _chosen_names(only: str, known: Sequence[str]) -> frozenset[str]:
    """The names that contain one of the words; all where there are none.

    Raises:
        UserError: a word is in no name.
    """
    words = only.replace(",", " ").split()
    for word in words:
        if not any(word in name for name in known):
            nearest = get_close_matches(word, known, n=1, cutoff=0.3)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            fix = f"{hint}docs/proof-tests.md lists all {len(known)}"
            raise UserError(Fault("only", "no such mutant", got=repr(word), fix=fix))
    if not words:
        return frozenset(known)
    chosen: set[str] = set()
    for word in words:
        chosen.update(name for name in known if word in name)
    return frozenset(chosen)
