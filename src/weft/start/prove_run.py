"""Proofs of a config before it runs, and of the recorded steps of a run folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from weft.code.identity import changed_parts, stored_parts
from weft.config.changed_runs import changes
from weft.config.load import load
from weft.config.rules.checks import Check, run_checks
from weft.config.run import Run
from weft.config.schema import SCORED
from weft.config.small_layers import layer_kinds
from weft.config.user_code import file_folder
from weft.core.axes import local_update_axis
from weft.errors import EXIT_OK, Fault, UserError
from weft.models import FAMILIES
from weft.models.code_of_run import code_of_run
from weft.prove.against.support import check_support
from weft.prove.losses import keep_losses
from weft.prove.recorded import first_config_path, recorded_steps
from weft.prove.report import ProofReport
from weft.prove.rows import STDLIB, Rows
from weft.start.checked_run import set_openmp_policy
from weft.start.prove_parts import recorded_coverage, trained_coverage
from weft.start.rules.data_sources import CROSS_ENTROPY
from weft.start.rules.start_checks import data_checks

STORED_WEIGHTS = ("model.from_hf", "lora.base")
WEIGHTS_NOTE = "the weights of {} are compared with --full only"


def proof_data_checks(run: Run) -> tuple[Check, ...]:
    """The checks of the data of a proof, which draws pairs and labelled texts where none are named."""
    names_data = run.data.source != STDLIB or bool(run.data.mix)
    values = {"loss": CROSS_ENTROPY}
    if run.loss in SCORED:
        values["data.format"] = "text"
    return data_checks(run if names_data else run.with_values(values))


def prove_config(
    run: Run,
    *,
    steps: int,
    full: bool = False,
    against: Literal["transformers"] | None = None,
    rows: Rows = "own",
) -> ProofReport:
    """Prove a config before it runs, and look for the smallest failing case where it fails.

    Args:
        full: with the sizes of the run; else with reduced ones, and short rows.
        against: what computes the other side; None: weft's model on one device.
        rows: of the data, with the sizes of the run.

    Raises:
        UserError: the other side does not compute the run's model or loss.
    """
    if against is not None:
        return _prove_against(run, steps=steps, full=full, rows=rows)
    from weft.prove.proof import prove  # late: it imports torch
    from weft.prove.shrink import smallest_case
    from weft.prove.subject import ProofCase, reduced_case

    case = ProofCase(run, steps, rows) if full else reduced_case(run, steps)
    compared = case.run
    report = prove(case.opened())
    reduced_keys = changes(run, compared)
    coverage = trained_coverage(run)
    report = replace(
        report,
        covered=coverage.covered,
        uncovered=coverage.uncovered,
        reduced=reduced_keys,
        command=case.command,
        notes=(*report.notes, *_weights_notes(reduced_keys), *_layer_notes(run, compared)),
    )
    if report.holds:
        return report
    return report.with_smallest(smallest_case(case, report))


def _prove_against(run: Run, *, steps: int, full: bool, rows: Rows) -> ProofReport:
    """Compare with transformers' class of the model."""
    mapping = check_support(run.model, run.lora, run.precision, loss=run.loss)
    from weft.prove.against.proof import prove_against  # late: it imports torch
    from weft.prove.subject import ProofCase, reduced_case

    case = ProofCase(run, steps, rows) if full else reduced_case(run, steps)
    compared = case.run
    report = prove_against(case.opened(), mapping=mapping, configured=run.model)
    reduced_keys = changes(run, compared)
    return replace(
        report,
        reduced=reduced_keys,
        command=f"{case.command} --against transformers",
        notes=(*report.notes, *_weights_notes(reduced_keys), *_layer_notes(run, compared)),
    )


def _weights_notes(reduced_keys: Collection[str]) -> Iterator[str]:
    """A note where stored weights are not compared.

    Args:
        reduced_keys: keys of the run that the proof has changed.
    """
    for key in STORED_WEIGHTS:
        if key in reduced_keys:
            yield WEIGHTS_NOTE.format(key)
            return


def _layer_notes(run: Run, compared: Run) -> Iterator[str]:
    """A note on the layers and kinds of them that are not compared."""
    numbers = [each.model.architecture.get("layers", 0) for each in (run, compared)]
    if numbers[0] == numbers[1]:
        return
    kinds = [len(set(layer_kinds(each.model, each.data.seq_len))) for each in (run, compared)]
    which = "all of kinds that are compared"
    if kinds[1] < kinds[0]:
        which = f"among them {kinds[0] - kinds[1]} of {kinds[0]} kinds"
    yield f"not compared: {numbers[0] - numbers[1]} of {numbers[0]} layers, {which}"


def _check_code(run: Run, folder: Path) -> None:
    """The code of the recorded steps must be that of now.

    Raises:
        UserError: it is not; names what differs.
    """
    code = code_of_run(run.model.name, run.optim.name)
    names = changed_parts(stored_parts(folder), code, folder=file_folder(run.model.name))
    if names:
        what = f"the code of the model differs from that of the run {folder}"
        raise UserError(Fault("model.name", f"{what}: {', '.join(names)}", fix="restore it"))


def ignore_line(line: str) -> int:
    """Print nothing."""
    return EXIT_OK


def prove_folder(
    folder: Path, *, first: int, show: Callable[[str], int] = ignore_line
) -> ProofReport:
    """Compare the recorded steps of a run folder, and keep the losses of one device in it.

    Args:
        first: steps.
        show: called with a line for each step.

    Raises:
        UserError: the folder has no recorded run, or its config is not possible any more.
    """
    run = load([str(first_config_path(folder))], FAMILIES)
    steps = recorded_steps(folder)
    _check_code(run, folder)
    if local_update_axis(run.device_mesh) is not None:
        what = "sites train apart, so the recorded steps are not those of one device"
        fix = f"weft prove {shlex.quote(str(first_config_path(folder)))}, which compares the algorithm"
        raise UserError(Fault("mesh", what, got=run.mesh, fix=fix))
    faults = run_checks(run, data_checks)
    if faults:
        raise UserError(*faults)
    set_openmp_policy()
    from weft.prove.recorded_run import prove_recorded  # late: it imports torch
    from weft.prove.subject import Subject

    compared = steps[:first]
    subject = Subject.of_recorded(run, steps=len(compared))
    report = prove_recorded(folder, subject, compared, show=show)
    keep_losses(folder, report.losses)
    coverage = recorded_coverage(run)
    return replace(report, covered=coverage.covered, uncovered=coverage.uncovered)
