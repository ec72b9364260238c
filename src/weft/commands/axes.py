"""`weft axes`: propose the table AXES of a model file, and prove it on a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.config.command_options import take_options
from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run, plan_of
from weft.config.schema import ConfigSection
from weft.config.user_code import canonical_reference, check_reference, is_reference, trust_named
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError
from weft.models import FAMILIES
from weft.start.checked_run import set_openmp_policy

if TYPE_CHECKING:
    from weft.prove.subject import ProofCase

USAGE = "MODEL.py [--check False] [--model.KEY value ...]"
LINE = "propose the AXES of a model file by tracing it, and prove them"
KEY = "weft axes"
MESH = "tp2"
SIZES = ("--batch.global_size", "4", "--batch.micro_size", "2", "--data.seq_len", "16")
STEPS = 2


class AxesOptions(ConfigSection):
    """What `weft axes` does besides proposing."""

    check: bool = Field(True, description=f"compare the proposal with one device on {MESH}")


def axes(words: Sequence[str]) -> int:
    """Print a proposal as Python code, what it leaves undecided, and the proof."""
    if wants_help(words):
        return show_help(
            AxesOptions(), f"weft axes {USAGE}", f"{LINE}. Any other key of `weft train`"
        )
    options, rest = take_options(words, AxesOptions)
    if not rest or not is_reference(rest[0]):
        fix = "weft axes my_model.py"
        raise UserError(Fault(KEY, "names no model", got=" ".join(rest[:1]), fix=fix))
    reference = canonical_reference(rest[0])
    trust_named(reference)
    check_reference(reference, key="model.name")
    set_openmp_policy()
    from weft.models.user_family import UserFamily  # they import torch
    from weft.models.user_model import model_of_file
    from weft.prove.subject import ProofCase
    from weft.train.model_checks import check_user_model
    from weft.train.propose_axes import propose

    model = replace(model_of_file(reference, needs_axes=False), name=reference)
    with FAMILIES.restored():
        whole = UserFamily(replace(model, AXES={"*": ()}))
        run = _run(whole, reference, rest[1:], mesh=MESH)
        proposal = propose(whole, run.model, plan_of(run))
        _print_proposal(proposal)
        if not options.check:
            return EXIT_OK
        proposed = UserFamily(replace(model, AXES=proposal.table))
        proposed_run = _run(proposed, reference, rest[1:], mesh=MESH)
        used = FAMILIES[proposed_run.model.name]
        check_user_model(used, proposed_run.model, plan_of(proposed_run))
        return _prove(ProofCase(proposed_run, STEPS))


def _print_proposal(proposal: Any) -> None:
    """The table, then what is undecided; `proposal`: a `weft.train.propose_axes.Proposal`."""
    lines = ["from weft import Stacked", ""] if proposal.needs_stacked else []
    print_result("\n".join((*lines, proposal.text())))
    for name, reason in proposal.undecided.items():
        print_result(f"# undecided: {name}: {reason}")


def _run(family: Any, reference: str, words: Sequence[str], *, mesh: str) -> Run:
    """A small run of the model with some table."""
    FAMILIES.add(family)
    run = load([reference, *SIZES, *words, "--mesh", mesh], FAMILIES)
    faults = run_checks(run, config_checks)
    if faults:
        raise UserError(*faults)
    return run


def _prove(case: ProofCase) -> int:
    """Compare the case with one device in float64."""
    from weft.prove.proof import prove  # late: it imports torch

    subject = case.opened()
    report = prove(subject.in_float64())
    if report.holds:
        print_result(f"# proven: {MESH} equals one device in float64, {STEPS} steps")
        return EXIT_OK
    print_result("\n".join(f"# {line}" for line in report.lines()))
    return EXIT_FAILED
