"""Owns what is checked of the surroundings before torch is imported: run folder, port, world size, device."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from weft.checkpoint.folder import FOLDER, checkpoints
from weft.config.checks import Check
from weft.config.run import Run
from weft.errors import CheckpointError, Fault, LaunchError
from weft.hf.match import match_folder
from weft.run.world import detect
from weft.train.resume import AUTO

RUNS = Path("runs")
EVENTS = "events.jsonl"
RANKS = ("RANK", "SLURM_PROCID")
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def is_first(env: Mapping[str, str], names: Iterable[str] = RANKS) -> bool:
    """Whether this process is the first rank (or starts all of them)."""
    return next((env[name] for name in names if name in env), "0") == "0"


def is_joining(env: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm has started the ranks; what is wrong with a half-told world is told elsewhere."""
    try:
        return detect(env) is not None
    except LaunchError:
        return True


def fresh_out(run: Run, now: datetime) -> Path:
    """A run folder that is not there yet: `runs/llama3-tiny-20260131-120000`."""
    base = RUNS / f"{run.model.preset or run.model.name}-{now:%Y%m%d-%H%M%S}"
    names = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in range(1, 1000))
    return next(name for name in names if not name.exists())


def world_faults(run: Run) -> Iterable[Fault]:
    """The ranks that are there, or are asked for, are as many as the mesh has."""
    size, mesh = run.device_mesh.size, repr(str(run.device_mesh))
    try:
        world = detect(os.environ)
    except LaunchError as error:
        yield from error.faults
        return
    announced = str(world.size) if world else os.environ.get("WORLD_SIZE", str(size))
    if announced != str(size):
        got = f"{announced} ranks started" if world else f"WORLD_SIZE={announced}"
        fix = f"start {size} ranks, or choose a mesh of {announced} such as --mesh dp{announced}"
        yield Fault("mesh", "differs from the world size", got, f"{size} for {mesh}", fix)
    if world is None and run.nproc not in (None, size):
        fix = f"--nproc {size}, or a mesh of {run.nproc} such as --mesh dp{run.nproc}"
        yield Fault("nproc", "differs from the mesh", f"{run.nproc}", f"{size} for {mesh}", fix)


def out_faults(run: Run) -> Iterable[Fault]:
    """The run folder can be written and holds no other run; only the first rank looks."""
    if not is_first(os.environ):
        return
    out = Path(run.out) if run.out else RUNS
    if run.out and not goes_on_in(run, out) and any(os.path.exists(out / name) for name in (EVENTS, FOLDER)):
        fix = "--resume auto to go on with it, another --out, or none for a fresh folder under runs/"
        yield Fault("out", "holds a run already", repr(str(out)), f"a folder without {EVENTS}", fix)
    elif (problem := _unwritable(out)) is not None:
        yield Fault("out", "cannot be written", f"{str(out)!r}: {problem}", "a folder", "choose another --out")


def goes_on_in(run: Run, out: Path) -> bool:
    """Whether what the run resumes lies in its own folder."""
    if run.resume in (None, AUTO):
        return run.resume == AUTO
    named = Path(run.resume or "").resolve()
    return out.resolve() in (named, named.parent, named.parent.parent)


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written below `folder`, as its nearest part that is there tells; nothing is made."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder)  # refuses names that no file system takes
        nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a zero byte in the name
        return str(error)


def port_faults(run: Run) -> Iterable[Fault]:
    """Nobody listens at the port where ranks shall meet; only who opens it looks."""
    if run.port is None or is_joining(os.environ):
        return
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("", run.port))
        except OSError as error:
            fix = "choose another --port, or leave it out for a free one"
            yield Fault("port", "cannot be opened", f"{run.port}: {error.strerror}", "a free port", fix)


def device_faults(run: Run) -> Iterable[Fault]:
    """Where cuda is asked for, there is some, as far as can be seen without torch."""
    if run.device != "cuda":
        return
    fix = "--device cpu, or auto"
    if importlib.metadata.version("torch").endswith("+cpu"):
        yield Fault("device", "this torch is built without CUDA", "cuda", "cpu", fix)
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield Fault("device", "CUDA_VISIBLE_DEVICES hides all GPUs", "cuda", "cpu", fix)
    elif not any(map(glob.glob, GPU_FILES)):
        yield Fault("device", "there is no GPU", "cuda", "cpu", fix)


def starts_anew(run: Run) -> bool:
    """Whether no checkpoint gives the starting values; `auto` may find none yet."""
    return run.resume is None or (run.resume == AUTO and not any(checkpoints(Path(run.out or ""))))


def start_faults(run: Run) -> Iterable[Fault]:
    """The folder that a new run starts from holds the tensors of its model, as far as their names tell."""
    if run.model.from_hf is None or not starts_anew(run):
        return
    try:
        match_folder(Path(run.model.from_hf), run.model)
    except CheckpointError as error:
        yield from (replace(fault, key="model.from_hf", what=f"{fault.key}: {fault.what}") for fault in error.faults)


def notes(run: Run) -> tuple[str, ...]:
    """What is no fault and worth a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if run.device == "cpu" and not is_joining(os.environ) and run.device_mesh.size > cores:
        return (f"{run.device_mesh.size} ranks share {cores} cores: right, and slower than {cores} ranks",)
    return ()


CHECKS = (
    Check(("mesh", "nproc"), world_faults),
    Check(("out", "resume"), out_faults),
    Check(("port",), port_faults),
    Check(("device",), device_faults),
    Check(("model", "resume"), start_faults),
)
