"""`weft launch`: write the job files of a run for a cluster engine, and submit them. Imports no torch."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.checkpoint.disk import replace_file
from weft.checkpoint.remote_url import url_faults
from weft.checkpoint.resume import AUTO
from weft.code.trust import TRUST_FLAG
from weft.commands.console import print_result, show_help, wants_help
from weft.config import flags, toml
from weft.config.optimizers import is_user_class
from weft.config.rules.checks import CheckTable
from weft.config.run import Run
from weft.config.user_code import is_reference
from weft.core.node_placement import NodePlacement
from weft.errors import EXIT_OK, Fault, UserError, WeftError, did_you_mean
from weft.launchers.catalog import ENGINES
from weft.launchers.job import (
    CONFIG,
    CONTAINER_RUNS,
    JOB_FOLDER,
    ClusterJob,
    Engine,
    LaunchOptions,
    job_name,
    num_gpus,
    size_faults,
    text_faults,
)
from weft.layout.mesh_order import order_problem
from weft.start.checked_run import load_checked_run
from weft.start.preflight import with_local_folder
from weft.start.rules.start_checks import data_checks, folder_checks
from weft.start.run_folder import new_run_folder

USAGE = "ENGINE [CONFIG.toml] [--key value ...] [--nodes N] [--gpus-per-node G] [--dry-run]"
LINE = "write and submit a job: slurm, ray, kubeflow, skypilot"
DRY_RUN = MappingProxyType({"--dry-run": "--dry_run=true", "--dry_run": "--dry_run=true"})
"""The flag that needs no value."""
SHARED_OPTIONS = tuple(LaunchOptions.model_fields)


@dataclass(frozen=True)
class _LaunchRequest:
    """The words of the command: its engine with options, and the words of the run config."""

    engine: Engine
    options: LaunchOptions
    run_words: list[str]


def launch(words: Sequence[str]) -> int:
    """Write the job files into RUN/job, print them, and submit them where the engine is installed.

    Raises:
        UserError: with every fault of options, config and folders; nothing is written.
    """
    if wants_help(words):
        return _help(words)
    request = _request(words)
    engine = request.engine
    options = request.options
    run = load_checked_run(request.run_words, *_tables(engine), adapt=with_local_folder)
    folder = run.out or new_run_folder(run.model, datetime.now())
    out = Path(folder).absolute()
    job = job_of(run, options, out=out, engine=engine)
    faults = [
        *size_faults(options, run.device_mesh, run.device),
        *option_faults(job, out, options=options, engine=engine),
    ]
    if run.transport == "threads":
        what = "ranks as threads cannot run on a cluster"
        faults.append(
            Fault("transport", what, got="threads", need="process", fix="leave transport out")
        )
    if run.save.remote is not None:
        faults.extend(url_faults(run.save.remote))
    if faults:
        raise UserError(*faults)
    engine_files = engine.files(job, options)
    first_name = next(iter(engine_files))
    command = engine.submit(job.folder / first_name, options)
    files = {CONFIG: job.config, **engine_files}
    print_result(text_of_files(job.folder, files))
    placement = NodePlacement.even(run.device_mesh.size, job.ranks_per_node)
    note = order_problem(run.device_mesh, placement)
    if note:
        print_result(f"note: {note}")
    if options.dry_run:
        again = [word for word in words if word.partition("=")[0] not in DRY_RUN]
        line = shlex.join(["weft", "launch", *again])
        return print_result(f"dry run: nothing is written. Write and submit it: {line}")
    write_files(job.folder, files)
    return submit(command)


def _help(words: Sequence[str]) -> int:
    """Options of the named engine, or of all engines."""
    for word in words:
        if word in ENGINES:
            engine = ENGINES[word]
            description = f"write a {engine.line}, and submit it. All keys of `weft train` as well"
            usage = f"weft launch {word} [CONFIG.toml] [--key value ...]"
            return show_help(engine.options(), usage, description)
    lines = [f"{name}: {engine.line}" for name, engine in ENGINES.items()]
    engines = "; ".join(lines)
    return show_help(
        LaunchOptions(),
        f"weft launch {USAGE}",
        f"{LINE}. {engines}. `weft launch ENGINE --help` shows all options; all keys of `weft train` as well",
    )


def _request(words: Sequence[str]) -> _LaunchRequest:
    """Split the words into engine, options and run config.

    Raises:
        UserError: no or an unknown engine, or wrong options.
    """
    name = words[0] if words else ""
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        hint = did_you_mean(name, ENGINES)
        fix = (
            hint if hint.startswith("did") else "for example weft launch slurm --mesh dp2 --nodes 2"
        )
        raise UserError(
            Fault(
                "weft launch",
                "needs an engine first",
                got=repr(name),
                need=f"one of {known}",
                fix=fix,
            )
        )
    engine = ENGINES[name]
    expanded = [DRY_RUN.get(word, word) for word in words[1:]]
    split = flags.split(expanded)
    own: list[str] = []
    others: list[str] = list(split.loose)
    for flag, given in split.flags:
        is_own = flag in engine.options.model_fields
        target = own if is_own else others
        target += [f"--{flag}" if len(flag) != 2 or flag[0] != "-" else flag, *given]
    return _LaunchRequest(
        engine=engine, options=flags.read_config(own, engine.options), run_words=others
    )


def _tables(engine: Engine) -> tuple[CheckTable, ...]:
    """Checks of data and folders, if the machines of the engine have those of this one."""
    if engine.shares_folder:
        return (data_checks, folder_checks)
    return ()


def job_of(run: Run, options: LaunchOptions, *, out: Path, engine: Engine) -> ClusterJob:
    """The job; its config has the folder of the run as the ranks see it, and resumes."""
    name = job_name(options, out)
    if engine.shares_folder:
        folder_of_ranks = str(out)
    else:
        folder_of_ranks = f"{CONTAINER_RUNS}/{out.name}"
    values: dict[str, Any] = {"out": folder_of_ranks}
    if run.resume is None:
        values["resume"] = AUTO
    config = toml.dump(run.with_values(values))
    ranks_per_node = max(1, run.device_mesh.size // options.nodes)
    return ClusterJob(
        name=name,
        nodes=options.nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=num_gpus(options, ranks_per_node, run.device),
        cpus_per_rank=options.cpus_per_rank,
        restarts=run.run.num_restarts,
        folder=out / JOB_FOLDER,
        work_folder=Path.cwd(),
        config=config,
        takes_snapshots=bool(run.save.memory_every),
        flags=(TRUST_FLAG,) if _names_code(run) else (),
    )


def _names_code(run: Run) -> bool:
    """Whether the config names code of the user, or whom to tell: the user trusts it here by now."""
    names_alert = run.alert.command is not None or run.alert.url is not None
    return is_reference(run.model.name) or is_user_class(run.optim.name) or names_alert


def option_faults(
    job: ClusterJob, out: Path, *, options: LaunchOptions, engine: Engine
) -> Iterator[Fault]:
    """Words of the options and paths that would not mean themselves in the files of a job, and what
    the engine finds.
    """
    own = [name for name in type(options).model_fields if name not in SHARED_OPTIONS]
    words = [name for name in own if isinstance(getattr(options, name), str)]
    yield from text_faults(options, (out, job.work_folder, *job.array), words)
    yield from engine.option_faults(options)


def text_of_files(folder: Path, files: Mapping[str, str]) -> str:
    """The job files, each below its path; of the config only the path."""
    parts = [f"# {folder / CONFIG}: the run config"] if CONFIG in files else []
    for name, text in files.items():
        if name != CONFIG:
            path = folder / name
            parts.append(f"# {path}\n{text}")
    return "\n".join(parts)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a job.

    Raises:
        UserError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text)
    except OSError as error:
        got = f"{str(folder)!r}: {error.strerror}"
        raise UserError(Fault("out", "cannot be written", got=got, fix="another --out")) from error


def submit(command: Sequence[str]) -> int:
    """Submit the job, if the command of the engine is installed."""
    line = shlex.join(command)
    if shutil.which(command[0]) is None:
        return print_result(
            f"written, not submitted: there is no {command[0]} here. Submit: {line}"
        )
    done = subprocess.run(command, check=False)  # noqa: S603 - the engine's command, without a shell
    if done.returncode:
        raise WeftError(f"{line}: exit code {done.returncode}; the job is not submitted")
    print_result(f"submitted: {line}")
    return EXIT_OK
