"""`weft prove`: compare a run or a config with one device; checks first, torch is imported after them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from weft.commands.console import check_files, print_result, show_help, wants_help
from weft.config.command_options import JsonOptions, json_writer, take_options
from weft.config.run import Run
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError
from weft.prove.html import page
from weft.prove.recorded import first_config_path
from weft.prove.report import ProofReport
from weft.prove.rows import Rows
from weft.start.auto_mesh import choose_mesh
from weft.start.auto_recompute import choose_recompute
from weft.start.checked_run import load_checked_run, set_openmp_policy
from weft.start.prove_parts import KEY as WHAT
from weft.start.prove_parts import named_parts, prove_run_parts, take_what
from weft.start.prove_run import ignore_line, proof_data_checks, prove_config, prove_folder
from weft.start.rules.start_checks import optimizer_checks

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


class ProveOptions(JsonOptions):
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
    is_json = options.json is not None
    if rest and os.path.isdir(rest[0]):
        folder = Path(rest[0])
    else:
        folder = None
    starts_anew = options.against is not None or bool(options.what)
    if folder is not None and starts_anew:  # the run's own config, from its start
        rest = [str(first_config_path(folder)), *rest[1:]]
        folder = None
    check_files(options, "html", "json")
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
        run = load_checked_run(
            rest, *tables, choose_mesh=choose_mesh, choose_recompute=choose_recompute
        )
        set_openmp_policy()
        report = _prove_checked(run, options)
    if options.html is not None:
        Path(options.html).write_text(page(report), encoding="utf-8")
    if options.json is not None:
        json_writer(options.json, sys.stdout.write)(f"{report.to_json()}\n")
    else:
        print_result("\n".join(report.lines()))
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
        run, steps=options.first, full=options.full, against=options.against, rows=options.rows
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
    """The command's own options, and all other words."""
    names, rest = take_what(words)
    if WHAT in words:
        named_parts(names)  # names that are not known end here
        rest.append(f"{WHAT}={','.join(names)}")
    return take_options(rest, ProveOptions)
