"""Checks of a run's environment before torch is imported: run folder, port, world size, device, initial parameters."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from weft.checkpoint.disk import replace_file
from weft.checkpoint.folder import FOLDER, checkpoints
from weft.checkpoint.resume import (
    AUTO,
    RESUME_KEYS,
    check_model,
    find_checkpoint,
    resume_faults,
    starts_new,
)
from weft.comm.interfaces import LOOPBACK
from weft.config.checks import Check
from weft.config.elastic import elastic_note, fit_to_ranks
from weft.config.finetuning import defaults_note
from weft.config.run import Run
from weft.config.schema import LoraConfig, ModelSection
from weft.config.validate import config_checks
from weft.core.mesh import Mesh
from weft.errors import CheckpointError, Fault, LaunchError, UserError, counted
from weft.hf.folder_checks import weight_faults
from weft.run.agent import restart_number
from weft.run.folder_lock import acquire, acquire_new, held_fault
from weft.run.world import detect, job_name, num_cores
from weft.small_files import UnreadableFile, read_text

RUNS = Path("runs")
JOB = ".job"
"""File in the folder of an elastic run: the name of the job that trains it."""
MAX_JOB_BYTES = 4096
EVENTS = "events.jsonl"
RANK_VARIABLES = ("RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def environment_checks(run: Run) -> tuple[Check, ...]:
    """The checks of a training run that read files, ports and devices, bound to its sections."""
    starts_from = {"resume": run.resume, "out": run.out}
    return (
        Check(
            ("mesh", "nproc"),
            partial(
                world_faults,
                run.device_mesh,
                run.nproc,
                is_elastic=run.run.elastic,
            ),
        ),
        Check(("out", "resume"), partial(out_faults, run.out, run.resume)),
        Check(("port",), partial(port_faults, run.port)),
        Check(("device",), partial(device_faults, run.device)),
        Check(("model", "resume"), partial(from_hf_faults, run.model, **starts_from)),
        Check(
            ("lora.base", "lora.rank", "model"),
            partial(lora_base_faults, run.lora, run.model, out=run.out),
        ),
        Check(
            RESUME_KEYS,
            partial(resume_faults, run.model, run.model_dump(mode="json"), **starts_from),
        ),
    )


def is_first(env: Mapping[str, str], names: Iterable[str] = RANK_VARIABLES) -> bool:
    """Whether this process is the first rank (or starts all of them)."""
    for name in names:
        if name in env:
            return env[name] == "0"
    return True


def is_joining(env: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm has started the ranks; `world_faults` reports an incomplete
    environment.
    """
    try:
        return detect(env) is not None
    except LaunchError:
        return True


def new_run_folder(model: ModelSection, now: datetime) -> Path:
    """A run folder that does not exist yet: `runs/llama3-tiny-20260131-120000`."""
    base = RUNS / f"{model.preset or model.name}-{now:%Y%m%d-%H%M%S}"
    folder = base
    number = 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def after_restart(run: Run) -> Run:
    """The run as it goes on when its agent (torchrun, Slurm) has started the ranks again: from the
    newest checkpoint of its own folder, if there is one; an elastic run on the ranks that there are.
    """
    run = _fit_to_world(run)
    if not run.out or resumes_in(Path(run.out), run.resume):
        return run
    if not _is_started_again(Path(run.out), is_elastic=run.run.elastic):
        return run
    has_checkpoint = any(checkpoints(Path(run.out)))
    if run.resume is not None and not has_checkpoint:
        return run
    return run.with_values({"resume": AUTO})


def _fit_to_world(run: Run) -> Run:
    """An elastic run on the best layout for the ranks that there are, at most the full one."""
    if not run.run.elastic:
        return run
    try:
        world = detect(os.environ)
    except LaunchError:
        return run
    size = world.size if world is not None else run.nproc
    full_mesh = run.run.full_mesh or run.mesh
    full = run.with_values({"mesh": full_mesh, "run.full_mesh": ""})
    if size is None:
        return full

    def is_valid(mesh: str) -> bool:
        checks = config_checks(full.with_values({"mesh": mesh}))
        return not any(check.fails() for check in checks)

    fitting = fit_to_ranks(full.device_mesh, size, is_valid=is_valid)
    if fitting is None:
        return run
    if size == full.device_mesh.size:
        return full
    return run.with_values({"mesh": fitting, "run.full_mesh": full_mesh})


def _is_started_again(out: Path, *, is_elastic: bool) -> bool:
    """Whether the agent has started the ranks of this run before.

    torchrun counts restarts after failures only: not those that add or remove machines, and anew on
    a machine that is added. So the folder of an elastic run names its job.
    """
    if restart_number(os.environ):
        return True
    job = job_name(os.environ)
    if not is_elastic or not job:
        return False
    try:
        return read_text(out / JOB, max_bytes=MAX_JOB_BYTES) == job
    except UnreadableFile:
        return False


def mark_job(out: Path, env: Mapping[str, str]) -> None:
    """Write the name of the job into the folder of an elastic run; the first rank does."""
    job = job_name(env)
    if job and is_first(env):
        replace_file(out / JOB, job)


@contextlib.contextmanager
def locked_out(
    model: ModelSection,
    out: str | None,
    resume: str | None,
    *,
    now: datetime,
) -> Iterator[str]:
    """The run folder, a new one where `out` is None; it is locked while open by the process that
    starts or is the first rank.

    Raises:
        UserError: another process writes into the folder.
    """
    if not is_first(os.environ):
        yield out or str(new_run_folder(model, now))
        return
    job = job_name(os.environ)
    if out:
        held = acquire(Path(out), job=job)
    else:
        folder, held = acquire_new(new_run_folder(model, now), job=job)
        out = str(folder)
    with held:
        faults = tuple(_holds_run(out, resume))  # another run may have ended since the checks
        if faults:
            raise UserError(*faults)
        yield out


def world_faults(mesh: Mesh, nproc: int | None, *, is_elastic: bool = False) -> Iterator[Fault]:
    """The number of ranks, started or requested, must be the size of the mesh."""
    size = mesh.size
    need = f"{size} for {str(mesh)!r}"
    try:
        world = detect(os.environ)
    except LaunchError as error:
        yield from error.faults
        return
    started = str(world.size) if world else os.environ.get("WORLD_SIZE", str(size))
    if started != str(size):
        got = f"WORLD_SIZE={started}"
        if world:
            got = f"{counted(world.size, 'rank')} started"
        ranks = counted(size, "rank")
        fix = f"start {ranks}, or choose a mesh of {started} such as --mesh dp{started}"
        if started.isdecimal() and int(started) < size and not is_elastic:
            fix += ", or --run.elastic True for the best smaller layout"
        yield Fault(
            "mesh",
            "differs from the world size",
            got=got,
            need=need,
            fix=fix,
        )
    if world is None and nproc not in (None, size):
        yield Fault(
            "nproc",
            "differs from the mesh",
            got=f"{nproc}",
            need=need,
            fix=f"--nproc {size}, or a mesh of {nproc} such as --mesh dp{nproc}",
        )


def out_faults(run_folder: str | None, resume: str | None) -> Iterator[Fault]:
    """The run folder must be writable and hold no other run; only the first rank checks."""
    if not is_first(os.environ):
        return
    out = Path(run_folder) if run_folder else RUNS
    in_use = None
    if run_folder and "\0" not in run_folder:
        in_use = held_fault(out, job=job_name(os.environ))
    faults = (in_use,) if in_use else tuple(_holds_run(run_folder, resume))
    if faults:
        yield from faults
        return
    problem = write_problem(out)
    if problem is not None:
        yield Fault(
            "out",
            "cannot be written",
            got=f"{str(out)!r}: {problem}",
            need="a folder",
            fix="choose another --out",
        )


def _holds_run(run_folder: str | None, resume: str | None) -> Iterator[Fault]:
    """A fresh start needs a folder without a run."""
    if not run_folder:
        return
    out = Path(run_folder)
    holds_run = any(os.path.exists(out / name) for name in (EVENTS, FOLDER))
    if holds_run and not resumes_in(out, resume):
        yield Fault(
            "out",
            "holds a run already",
            got=repr(str(out)),
            need=f"a folder without {EVENTS}",
            fix="--resume auto to resume it, another --out, or none for a new folder under runs/",
        )


def resumes_in(out: Path, resume: str | None) -> bool:
    """Whether the checkpoint that a run resumes is in its own folder."""
    if resume is None:
        return False
    if resume == AUTO:
        return True
    named = Path(resume).resolve()
    return out.resolve() in (named, named.parent, named.parent.parent)


def write_problem(folder: Path) -> str | None:
    """Why `folder` cannot be created or written, judged by its nearest existing parent; creates
    nothing.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder)  # rejects names that no file system takes
        existing = folder
        while not os.path.lexists(existing):
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a zero byte in the name
        return str(error)


def port_faults(port: int | None) -> Iterator[Fault]:
    """The rendezvous port must be free; only the process that opens it checks."""
    if port is None or is_joining(os.environ):
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError as error:
            fix = "choose another --port, or leave it out for a free one"
            yield Fault(
                "port",
                "cannot be opened",
                got=f"{port}: {error.strerror}",
                need="a free port",
                fix=fix,
            )


def device_faults(device: str) -> Iterator[Fault]:
    """If cuda is requested there must be a GPU, as far as can be seen without torch."""
    if device != "cuda":
        return
    fix = "--device cpu, or auto"
    if importlib.metadata.version("torch").endswith("+cpu"):
        yield Fault(
            "device",
            "this torch is built without CUDA",
            got="cuda",
            need="cpu",
            fix=fix,
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield Fault(
            "device",
            "CUDA_VISIBLE_DEVICES hides all GPUs",
            got="cuda",
            need="cpu",
            fix=fix,
        )
    elif not any(glob.glob(pattern) for pattern in GPU_FILES):
        yield Fault("device", "there is no GPU", "cuda", "cpu", fix)


def from_hf_faults(
    model: ModelSection,
    *,
    resume: str | None = None,
    out: str | None = None,
) -> Iterator[Fault]:
    """The Hugging Face folder that a new run starts from must hold the model's tensors, judged by
    their names.
    """
    if model.from_hf is None or not starts_new(resume, out):
        return
    for fault in weight_faults(Path(model.from_hf), model):
        yield replace(fault, key="model.from_hf", what=f"{fault.key}: {fault.what}")


def lora_base_faults(
    lora: LoraConfig,
    model: ModelSection,
    *,
    out: str | None,
) -> Iterator[Fault]:
    """The checkpoint that `lora.base` means must exist and be of this model, judged by its
    manifest.

        lora.base = runs/x                      the newest valid checkpoint of that run
        lora.base = runs/x/ckpt/step-000100     this checkpoint

    Adapters that it has itself are merged into its parameters.
    """
    key = "lora.base"
    base = lora.base
    if base is None:
        return
    if not lora.rank:
        what = "is 0, no adapters, but lora.base names their base model"
        yield Fault("lora.rank", what, fix="--lora.rank 8")
        return
    if model.from_hf is not None:
        what = "the model has initial parameters already"
        yield Fault(
            key,
            what,
            got=f"model.from_hf {model.from_hf!r}",
            fix="name one of them",
        )
        return
    if "\0" in base:
        yield Fault(key, "is not a valid file name", repr(base))
        return
    try:
        found = find_checkpoint(base, out)
        if found.path is not None and found.manifest is not None:
            facts = found.manifest.facts
            check_model(
                found.path,
                facts,
                family=model.name,
                architecture=model.architecture,
            )
            return
    except CheckpointError as error:
        for fault in error.faults:
            yield Fault(
                key,
                f"{fault.key}: {fault.what}",
                got=fault.got,
                need=fault.need,
                fix=fault.fix,
            )
        return
    if found.faults:
        yield found.faults[0]
    else:
        fix = "a run with --save.every, or one of its checkpoints"
        yield Fault(key, "holds no checkpoint", repr(base), fix=fix)


def notes(mesh: Mesh, device: str) -> tuple[str, ...]:
    """Remarks on the environment that do not prevent the run."""
    num_cores_here = num_cores()
    size = mesh.size
    is_overloaded = device == "cpu" and size > num_cores_here
    if not is_overloaded or is_joining(os.environ):
        return ()
    cores = counted(num_cores_here, "core")
    as_many_ranks = counted(num_cores_here, "rank")
    return (f"{size} ranks share {cores}: correct, but slower than {as_many_ranks}",)


def training_notes(run: Run) -> tuple[str, ...]:
    """`notes`, and remarks on what a new run trains."""
    model, lora = run.model, run.lora
    found = list(notes(run.device_mesh, run.device))
    if run.run.full_mesh:
        found.append(elastic_note(run.device_mesh, Mesh.parse(run.run.full_mesh)))
    if restart_number(os.environ) and not run.resume:
        found.append("started again by the agent without a checkpoint in --out: from step 0")
    if not starts_new(run.resume, run.out):
        return tuple(found)
    if lora.rank and model.from_hf is None and lora.base is None:
        found.append(
            "the base model of the LoRA adapters has random weights; "
            "set --model.from_hf or --lora.base to a trained model"
        )
    defaults = defaults_note(
        model,
        run.optim,
        seq_len=run.data.seq_len,
        lora_rank=lora.rank,
    )
    if defaults is not None:
        found.append(defaults)
    return tuple(found)
