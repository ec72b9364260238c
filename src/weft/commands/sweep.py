"""`weft sweep`: a run for every combination of values, in turn or as a job array. Checks all before the first. No torch."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from weft.checkpoint.folder import FOLDER as CHECKPOINTS
from weft.checkpoint.remote_url import is_url
from weft.checkpoint.resume import AUTO
from weft.commands.console import (
    check_files,
    print_json,
    print_result,
    print_table,
    show_help,
    wants_help,
)
from weft.commands.status import DONE, UNDER_WAY, run_status
from weft.commands.sweep_array import submit_array
from weft.commands.sweep_results import recorded, results_table, write_page
from weft.commands.sweep_runs import NEW, PlannedRun, train_all
from weft.config import flags
from weft.config.base_files import read_with_bases
from weft.config.command_options import STANDARD_OUTPUT, JsonOptions, take_options
from weft.config.grid import Grid, GridPoint, grid_of
from weft.config.keys import Flat, keys_of
from weft.config.load import try_load
from weft.config.run_files import different_keys, stored_config
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError
from weft.launchers.slurm import SlurmOptions
from weft.models import FAMILIES
from weft.start import preflight
from weft.start.auto_mesh import choose_before_ranks
from weft.start.checked_run import load_checked_run, stored_form
from weft.start.environment import is_joining
from weft.start.preflight import with_local_folder
from weft.start.report_at_end import EVENTS
from weft.start.rules.run_folders import RUNS
from weft.start.rules.start_checks import data_checks, environment_checks, folder_checks

NAME = "weft sweep"
USAGE = "[CONFIG.toml | MODEL.py] --key VALUE VALUE ... [--out FOLDER] [--array slurm] [--json]"
LINE = "train a run for every combination of values, and compare them"
MAY_DIFFER = (
    *("steps", "resume_code", "nproc", "port", "report", "track", "profile"),
    *("sample", "sample_every", "save", "log", "run", "prove"),
)
"""Keys and sections that may differ between a stored run and the same one, to be finished."""


class GridSweepOptions(JsonOptions):
    """Where the runs are."""

    array: Literal["slurm"] | None = Field(
        None,
        description="submit the runs as a job array, instead of one after the other; takes the options of `weft launch slurm`",
    )
    out: str | None = Field(
        None,
        description="folder of the sweep, with a folder for each run; None: one under runs/, the same for the same words",
    )


def sweep(words: Sequence[str]) -> int:
    """Check every run, train those that are not finished, and print the results.

    Raises:
        UserError: with every fault of the values and of each run; nothing has been started.
    """
    if wants_help(words):
        usage = f"{NAME} {USAGE}"
        return show_help(GridSweepOptions(), usage, f"{LINE}. All keys of `weft train` as well")
    options, run_words = take_options(words, GridSweepOptions)
    slurm = None
    if options.array is not None:
        slurm, run_words = take_options(run_words, SlurmOptions)
    check_files(options, "json")
    grid = grid_of(run_words, _known_keys(run_words))
    folder = _folder(options, run_words)
    planned = _checked_runs(grid, folder, is_array=slurm is not None)
    if slurm is not None:
        left = [run for run in planned if not run.is_finished and run.state not in UNDER_WAY]
        code = submit_array(left, folder, slurm) if left else EXIT_OK
        has_begun = any(run.state != NEW for run in planned)
        return code or (_show(grid, planned, folder, options) if has_begun else EXIT_OK)
    output = sys.stderr if options.json == STANDARD_OUTPUT else sys.stdout
    code = train_all(planned, output, again=shlex.join(["weft", "sweep", *words]))
    return code or _show(grid, planned, folder, options)


def _known_keys(words: Sequence[str]) -> dict[str, FieldInfo]:
    """The keys of a run of the model that the words name first."""
    split = flags.split(words)
    named = list(split.loose)
    for key, given in split.flags:
        if key.startswith("model.") and given:
            named += [f"--{key}", given[0]]
    return keys_of(type(try_load(named, FAMILIES).run))


def _folder(options: GridSweepOptions, words: Sequence[str]) -> Path:
    """The folder of the sweep; without a name one that the same words and files lead to again.

    Raises:
        UserError: it is a URL.
    """
    if options.out is not None and is_url(options.out):
        fix = "--out with a folder of this machine"
        raise UserError(Fault("out", "is a URL", got=options.out, need="a folder", fix=fix))
    if options.out is not None:
        return Path(os.path.expanduser(options.out))
    files = [word for word in flags.split(words).loose if os.path.isfile(word)]
    contents = [Path(file).read_bytes() if file.endswith(".py") else _keys(file) for file in files]
    digest = hashlib.sha256(repr((tuple(words), contents)).encode()).hexdigest()[:8]
    label = Path(files[0]).stem if files else "sweep"
    return RUNS / f"{label}-{digest}"


def _keys(file: str) -> Flat | None:
    """The keys of a config file with those of its bases; None where it cannot be read."""
    try:
        return read_with_bases(file)
    except UserError:  # reported by the checks
        return None


def _checked_runs(grid: Grid, folder: Path, *, is_array: bool) -> list[PlannedRun]:
    """All runs, each with every check that `weft train` makes; of an array, which other machines
    train, those of `weft launch`.

    Raises:
        UserError: with every fault; one that several runs have is reported once.
    """
    if is_joining(os.environ):
        what = "starts its runs itself, and torchrun or Slurm has started this process"
        raise UserError(Fault(NAME, what, fix="start it without them, on one machine"))
    planned: list[PlannedRun] = []
    found: dict[Fault, list[str]] = {}
    for point in grid.points:
        try:
            planned.append(_checked_run(point, folder / point.name, is_array=is_array))
        except UserError as error:
            for fault in error.faults:
                found.setdefault(fault, []).append(point.name)
    if found:
        raise UserError(*_named_faults(found, num_runs=len(grid.points)))
    return planned


def _named_faults(found: Mapping[Fault, Sequence[str]], *, num_runs: int) -> Iterator[Fault]:
    """Each fault with the runs that have it, where that is not all of them."""
    for fault, names in found.items():
        if len(names) == num_runs:
            yield fault
            continue
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield replace(fault, what=f"{fault.what}, in the run {names[0]}{more}")


def _checked_run(point: GridPoint, folder: Path, *, is_array: bool) -> PlannedRun:
    """One run, new or to be finished.

    Raises:
        UserError: with every fault of its config and of its folder.
    """
    state = run_status(folder, now_s=time.monotonic()).state if _is_begun(folder) else NEW
    if state in UNDER_WAY and not is_array:
        what = "holds a run that another process trains"
        raise UserError(Fault("out", what, got=repr(str(folder)), fix="wait for its end"))
    words = (*point.words, "--out", str(folder), "--resume", "None" if state == NEW else AUTO)
    stored = stored_config(folder)
    if is_array:
        tables, adapt, choose_mesh = (data_checks, folder_checks), with_local_folder, None
    else:
        tables = (data_checks, environment_checks)
        adapt, choose_mesh = preflight.after_restart, choose_before_ranks
    run = load_checked_run(words, *tables, adapt=adapt, choose_mesh=choose_mesh)
    if run.save.remote is not None:
        what = "is one URL, to which all runs would copy their checkpoints"
        fix = "--save.remote None; copy the folder of the sweep at its end"
        raise UserError(Fault("save.remote", what, got=run.save.remote, fix=fix))
    if state != NEW:
        _check_same(stored, stored_form(run), folder)
    is_finished = state == DONE and int(stored.get("steps", 0)) >= run.steps
    return PlannedRun(point, folder, words, run, state, is_finished=is_finished)


def _is_begun(folder: Path) -> bool:
    return (folder / EVENTS).is_file() or (folder / CHECKPOINTS).is_dir()


def _check_same(stored: Flat, now: Flat, folder: Path) -> None:
    """The run of a folder is the one that is asked for, finished or not.

    Raises:
        UserError: some key has another value.
    """
    keys = [
        key
        for key in different_keys([stored, now])
        if key not in MAY_DIFFER and key.partition(".")[0] not in MAY_DIFFER
    ]
    if keys:
        key = keys[0]
        more = f", and {len(keys) - 1} more keys differ" if len(keys) > 1 else ""
        what = f"holds a run of another sweep: {folder} has {key} {stored.get(key)}{more}"
        raise UserError(
            Fault("out", what, got=f"{key} {now.get(key)}", fix="another --out, or the same words")
        )


def _show(
    grid: Grid, planned: Sequence[PlannedRun], folder: Path, options: GridSweepOptions
) -> int:
    """Print the results, and write the page; the exit code says whether all runs have finished."""
    now_s = time.monotonic()
    found = []
    for run in planned:
        state = run_status(run.folder, now_s=now_s).state if _is_begun(run.folder) else NEW
        found.append(recorded(run.point, run.folder, state))
    found.sort(key=lambda run: run.order)
    page = write_page(found, folder)
    code = EXIT_OK if all(run.state == DONE for run in found) else EXIT_FAILED
    if options.json is not None:
        print_json(options.json, {"folder": str(folder), "runs": [run.to_json() for run in found]})
        return code
    print_result("")
    print_table(results_table(found, grid.keys))
    print_result("")
    if page is not None:
        print_result(f"the page of all runs: {page}")
    best = [shlex.quote(str(run.folder)) for run in found if run.record is not None][:2]
    if len(best) == 2:
        print_result(f"the two best: weft compare {' '.join(best)}")
    return code
