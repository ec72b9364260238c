"""`mesh = "auto"`: the fastest legal mesh for the devices that are there; the other keys of a run stay as they are.

Note [Choice of a mesh]
    The choice is a function of the config, the number of ranks and the kind of device, without
    clocks or random numbers. Of ranks that torchrun or Slurm has started rank 0 chooses for all
    (shared_choice.py). Ranks that weft starts get the choice of the process that starts them. Before a training run layouts are
    measured in a process of their own: a backward starts threads of autograd, which do not survive
    the fork of the ranks, and the meta device loads modules that the ranks do not need.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from weft.checkpoint.folder import FOLDER
from weft.checkpoint.resume import AUTO, starts_new
from weft.config import toml
from weft.config.load import AUTO_MESH
from weft.config.run import Run
from weft.errors import ConfigError, Fault
from weft.run.world import detect
from weft.start.installed import installed

RUN_FILE = "run.toml"
ENTRY_POINTS = "weft.meshes"
"""Group of entry points by which an installed package names the function that searches a mesh."""


@dataclass(frozen=True)
class ChosenMesh:
    """A mesh, and one line that says why."""

    mesh: str
    note: str

    @staticmethod
    def because(mesh: str, reason: str) -> ChosenMesh:
        """A mesh with the reason of its choice."""
        return ChosenMesh(mesh, f"mesh auto -> {mesh or 'one rank'} ({reason})")


class ChooseMesh(Protocol):
    """Chooses the mesh of a run that is valid apart from it; `is_flag`: --mesh auto is a flag."""

    def __call__(self, run: Run, *, is_flag: bool) -> ChosenMesh: ...


class SearchMesh(Protocol):
    """Searches the fastest mesh for the devices that are here; `before_ranks`: ranks start after it."""

    def __call__(self, run: Run, *, before_ranks: bool) -> ChosenMesh: ...


def choose_mesh(run: Run, *, is_flag: bool, before_ranks: bool = False) -> ChosenMesh:
    """The mesh that a resumed run has recorded, unless --mesh is given; else the one with the least
    predicted time of a step. See Note [Choice of a mesh].

    Args:
        before_ranks: ranks are started afterwards.

    Raises:
        UserError: no layout is legal, or fits; the device is unknown; variables of the launcher are
            not valid.
    """
    choose = partial(_choose_here, run, is_flag=is_flag, before_ranks=before_ranks)
    world = detect(os.environ)
    if world is None:
        return choose()
    from weft.start.shared_choice import choose_once, shared_store  # late: it imports torch

    store = shared_store(world)
    if store is None:
        return choose()
    shared = choose_once(lambda: asdict(choose()), store, world)
    return ChosenMesh(**shared)


def _choose_here(run: Run, *, is_flag: bool, before_ranks: bool) -> ChosenMesh:
    """`choose_mesh` in this process."""
    if not is_flag and run.resume is not None:
        mesh, path = recorded_value(run.resume, run.out, "mesh") or (AUTO_MESH, None)
        if mesh != AUTO_MESH:
            return ChosenMesh.because(mesh, f"as in {path}; --mesh auto chooses anew")
    search: SearchMesh | None = installed(ENTRY_POINTS, AUTO_MESH)
    if search is None:
        what = "auto is searched by the package weft_plan, which is not installed"
        raise ConfigError(
            Fault("mesh", what, AUTO_MESH, fix="pip install weft-train, or name a mesh")
        )
    return search(run, before_ranks=before_ranks)


def recorded_value(resume: str, out: str | None, key: str) -> tuple[str, Path] | None:
    """The text of a key in the config of the run whose checkpoint is resumed, and the file."""
    if starts_new(resume, out):
        return None
    named = Path(out or "") if resume == AUTO else Path(resume)
    num_above = 2 if named.parent.name == FOLDER else 1
    for folder in (named, *named.parents[:num_above]):
        path = folder / RUN_FILE
        if not path.is_file():
            continue
        return str(toml.read(str(path)).get(key, "")), path
    return None


def choose_before_ranks(run: Run, *, is_flag: bool) -> ChosenMesh:
    """`choose_mesh` for a command that starts ranks."""
    return choose_mesh(run, is_flag=is_flag, before_ranks=True)


def not_taken(taking: Collection[str] = ("train", "explain", "simulate", "prove")) -> Fault:
    """`auto` for a command that does not choose a mesh."""
    commands = ", ".join(f"`weft {name}`" for name in taking)
    what = f"auto is chosen by {commands} alone"
    return Fault("mesh", what, AUTO_MESH, "axes with degrees", "--mesh dp2; see `weft plan`")
