"""`weft prove`: compare a run or a config with one device; checks first, torch is imported after them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from weft.code.identity import changed_parts, stored_parts
from weft.commands.auto_mesh import choose_mesh
from weft.commands.console import (
    check_page_path,
    load_checked_run,
    print_result,
    set_openmp_policy,
    show_help,
    take_flag,
    wants_help,
)
from weft.commands.data_checks import CROSS_ENTROPY
from weft.commands.preflight import data_checks, optimizer_checks
from weft.commands.prove_parts import KEY as WHAT
from weft.commands.prove_parts import (
    named_parts,
    prove_run_parts,
    recorded_coverage,
    take_what,
    trained_coverage,
)
from weft.config import flags
from weft.config.changed_runs import changes
from weft.config.checks import Check, run_checks
from weft.config.load import load
from weft.config.run import Run
from weft.config.schema import ConfigSection
from weft.config.small_layers import layer_kinds
from weft.config.user_code import file_folder
from weft.core.axes import local_update_axis
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError
from weft.models import FAMILIES
from weft.models.code_of_run import code_of_run
from weft.prove.against.support import check_support
from weft.prove.html import page
from weft.prove.recorded import first_config_path, recorded_steps
from weft.prove.report import ProofReport
from weft.prove.rows import Rows

USAGE = (
    "[RUN | CONFIG.toml] [--first 4] [--what PART ...] [--against transformers] [--json] "
    "[--html FILE] | --mutants | --sweep MINUTES"
)
LINE = "compare a run or a layout with one device, number by number"
KEY = "weft prove"
STDLIB = "stdlib"
"""The data of a config that names none."""
STORED_WEIGHTS = ("model.from_hf", "lora.base")
WEIGHTS_NOTE = "the weights of {} are compared with --full only"

MODES = ("--mutants", "--sweep")
"""Flags that test the proof itself, with commands of their own in the package weft_selftest."""


class ProveOptions(ConfigSection):
    """What `weft prove` compares, besides a run folder or the keys of a run."""

    first: int = Field(
        4,
        ge=1,
        le=100_000,
        description="steps to compare, from the first; the last one follows a checkpoint that is read back",
    )
    full: bool = Field(
        False,
        description="keep the sizes of model and batch; else they are as small as the layout allows",
    )
    against: Literal["transformers"] | None = Field(
        None,
        description="compare with transformers' own class of the model, which shares no code with "
        "weft, in place of weft's model on one device; needs the extra `oracle`",
    )
    rows: Rows = Field(
        "own",
        description="with --full: sequences of the data, or of short documents made of its first ones",
    )
    what: str = Field(
        "",
        description="parts of the run to prove in place of its training: resume, generate, export, "
        "dpo, sites, or all; several are separated by spaces or commas",
    )
    to: str | None = Field(
        None,
        description="with --what: mesh on which the run is continued or imported; None: some others",
    )
    html: str | None = Field(None, description="write the report to this file, too, as a page")


def prove(words: Sequence[str]) -> int:
    """Compare a run, or a config, with one device; exit code 1 where they differ."""
    if wants_help(words):
        return show_help(
            ProveOptions(),
            f"weft prove {USAGE} [--full]",
            f"{LINE}. Without a run: any key of `weft train`. --json prints the report as JSON; "
            "--mutants plants faults that proofs must report, --sweep proves generated layouts",
        )
    options, rest = _read_options(words)
    json_flag, rest = _take_switch("--json", rest)
    is_json = json_flag[1:] == ["True"]
    if rest and os.path.isdir(rest[0]):
        folder = Path(rest[0])
    else:
        folder = None
    starts_anew = options.against is not None or bool(options.what)
    if folder is not None and starts_anew:  # the run's own config, from its start
        rest = [str(first_config_path(folder)), *rest[1:]]
        folder = None
    if options.html is not None:
        check_page_path(options.html)
    _check_combination(options)
    if folder is not None:
        if len(rest) > 1:
            what = "a run folder takes no keys: it has its own config"
            raise UserError(Fault(KEY, what, got=" ".join(rest[1:]), fix="leave them out"))
        show = ignore_line if is_json else print_result
        report = prove_folder(folder, first=options.first, show=show)
    else:
        # short rows fit any vocabulary
        tables = [optimizer_checks, *([proof_data_checks] if options.rows == "own" else [])]
        run = load_checked_run(rest, *tables, choose_mesh=choose_mesh)
        set_openmp_policy()
        report = _prove_checked(run, options)
    if options.html is not None:
        Path(options.html).write_text(page(report), encoding="utf-8")
    print_result(report.to_json() if is_json else "\n".join(report.lines()))
    return EXIT_OK if report.holds else EXIT_FAILED


def _prove_checked(run: Run, options: ProveOptions) -> ProofReport:
    """The proof that the options ask for, of a run without faults."""
    if options.what:
        return prove_run_parts(
            run,
            options.what.split(","),
            steps=options.first,
            full=options.full,
            rows=options.rows,
            to=options.to,
        )
    return prove_config(
        run,
        steps=options.first,
        full=options.full,
        against=options.against,
        rows=options.rows,
    )


def _check_combination(options: ProveOptions) -> None:
    """Check that options mean something together.

    Raises:
        UserError: they do not.
    """
    if options.what and options.against is not None:
        what = "compares the training of a run, and --what other parts of it"
        fix = f"two commands, one without --what {options.what.replace(',', ' ')}"
        raise UserError(Fault("--against", what, got=f"--what {options.what}", fix=fix))
    if options.to is not None and not options.what:
        what = "is the mesh of a continued run, and nothing continues without --what"
        raise UserError(Fault("--to", what, got=options.to, fix="--what resume"))


def _read_options(words: Sequence[str]) -> tuple[ProveOptions, list[str]]:
    """The command's own options, and all other words, among them --json."""
    names, rest = take_what(words)
    given: list[str] = []
    if WHAT in words:
        named_parts(names)  # names that are not known end here
        given.extend((WHAT, ",".join(names)))
    for name in ("--first", "--against", "--html", "--rows", "--to"):
        flag, rest = take_flag(name, rest)
        given.extend(flag)
    flag, rest = _take_switch("--full", rest)
    given.extend(flag)
    return flags.read_config(given, ProveOptions), rest


def _take_switch(name: str, words: list[str]) -> tuple[list[str], list[str]]:
    """`--name` alone, or with True or False after it, as a flag with a value; and all other words."""
    if name not in words:
        return [], words
    start = words.index(name)
    before = words[:start]
    after = words[start + 1 :]
    value = "True"
    if after and after[0] in ("True", "False"):
        value = after.pop(0)
    return [name, value], [*before, *after]


def proof_data_checks(run: Run) -> tuple[Check, ...]:
    """The checks of the data of a proof, which draws preference pairs where none are named."""
    names_data = run.data.source != STDLIB or bool(run.data.mix)
    return data_checks(run if names_data else run.with_values({"loss": CROSS_ENTROPY}))


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
    mapping = check_support(run.model, run.lora, loss=run.loss)
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
    folder: Path,
    *,
    first: int,
    show: Callable[[str], int] = ignore_line,
) -> ProofReport:
    """Compare the recorded steps of a run folder.

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
    coverage = recorded_coverage(run)
    return replace(report, covered=coverage.covered, uncovered=coverage.uncovered)
