"""A sweep as a job array of Slurm: a config for each run, one batch script whose tasks are the runs, and its submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.commands.console import print_result
from weft.commands.launch import job_of, option_faults, submit, text_of_files, write_files
from weft.commands.sweep_runs import PlannedRun
from weft.errors import Fault, UserError
from weft.launchers.job import CONFIG, size_faults
from weft.launchers.slurm import ENGINE, SlurmOptions


def submit_array(planned: Sequence[PlannedRun], folder: Path, options: SlurmOptions) -> int:
    """Write the configs and the batch script of these runs, and submit it; the exit code.

    Raises:
        UserError: the runs have different numbers of ranks, or an option does not fit them; nothing
            is written.
    """
    jobs = [
        job_of(each.run, options, out=each.folder.absolute(), engine=ENGINE) for each in planned
    ]
    first = planned[0].run
    job = replace(
        job_of(first, options, out=folder.absolute(), engine=ENGINE),
        restarts=max(each.restarts for each in jobs),
        takes_snapshots=any(each.takes_snapshots for each in jobs),
        flags=next((each.flags for each in jobs if each.flags), ()),
        array=tuple(each.config_path for each in jobs),
    )
    faults = [
        *_unequal(planned),
        *size_faults(options, first.device_mesh, first.device),
        *option_faults(job, folder.absolute(), options=options, engine=ENGINE),
    ]
    if faults:
        raise UserError(*faults)
    files = ENGINE.files(job, options)
    print_result(text_of_files(job.folder, files))
    if options.dry_run:
        return print_result("dry run: nothing is written or submitted")
    for each in jobs:
        write_files(each.folder, {CONFIG: each.config})
    write_files(job.folder, files)
    return submit(ENGINE.submit(job.folder / next(iter(files)), options))


def _unequal(planned: Sequence[PlannedRun]) -> list[Fault]:
    """Tasks of an array have equally many ranks, on the same kind of device."""
    sizes = {each.run.device_mesh.size: str(each.run.device_mesh) for each in planned}
    faults = []
    if len(sizes) > 1:
        got = ", ".join(f"{size} ({mesh or 'no mesh'})" for size, mesh in sorted(sizes.items()))
        what, fix = "the runs have different numbers of ranks", "a sweep for each number of ranks"
        faults.append(Fault("array", what, got=got, fix=fix))
    if any(each.run.transport == "threads" for each in planned):
        what = "ranks as threads cannot run on a cluster"
        fix = "leave transport out"
        faults.append(Fault("transport", what, got="threads", need="process", fix=fix))
    return faults
