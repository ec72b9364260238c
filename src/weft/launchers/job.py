"""A training job on a cluster: its options, its sizes, and the texts that are safe in every job file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from weft.config.schema import ConfigSection
from weft.core.mesh import Mesh
from weft.errors import Fault, counted

JOB_FOLDER = "job"
"""Folder of a run folder that holds the job files."""
CONFIG = "config.toml"
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
WORD = re.compile(r"[A-Za-z0-9][\w./:@,+=-]*", re.ASCII)
PATH = re.compile(r"/[\w/.,:+@=~ -]*")
"""Names and paths that mean themselves in shells, YAML, and Slurm's directives and file patterns."""


class LaunchOptions(ConfigSection):
    """Where and how a job runs, besides the keys of `weft train`."""

    nodes: int = Field(1, ge=1, le=2**20, description="machines")
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="GPUs of each node; None: one for each rank, or 0 with --device cpu"
    )
    cpus_per_rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="cores of each rank; None: the default of the engine"
    )
    name: str = Field("", description="name of the job; empty: that of the run folder")
    dry_run: bool = Field(
        False, description="write nothing and submit nothing, print what would be written"
    )


@dataclass(frozen=True)
class ClusterJob:
    """What is the same for every engine.

    Attributes:
        gpus_per_node: 0 on CPUs.
        restarts: how often failed ranks are started again; a preemption does not count.
        takes_snapshots: whether the ranks keep snapshots in the memory of their nodes.
        folder: absolute path of the run folder's folder for job files.
        work_folder: absolute path of the folder in which the ranks start.
        config: text of the run config.
        flags: of `weft train` beside the config: trust in a user's code, which machines may not have
            run before.
        array: the config of each task of a job array; () for one run.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int | None
    restarts: int
    folder: Path
    work_folder: Path
    config: str
    takes_snapshots: bool = False
    flags: tuple[str, ...] = ()
    array: tuple[Path, ...] = ()
    python: str = sys.executable

    @property
    def config_path(self) -> Path:
        """Where the run config is written."""
        return self.folder / CONFIG

    @property
    def cpus_per_node(self) -> int | None:
        """Cores of each node; None: the default of the engine."""
        return None if self.cpus_per_rank is None else self.cpus_per_rank * self.ranks_per_node


@dataclass(frozen=True)
class Engine:
    """One cluster engine.

    Attributes:
        options: its options with their defaults; their type extends `LaunchOptions`.
        shares_folder: whether its machines have the folders of this one. Others mount a volume or
            a bucket at `CONTAINER_RUNS`.
        option_faults: what is wrong with the options of this engine.
        files: name -> text of the job files, the one to submit first.
        submit: the command that submits a job file; its first word must be installed.
    """

    name: str
    line: str
    options: type[LaunchOptions]
    shares_folder: bool
    option_faults: Callable[[Any], Iterator[Fault]]
    files: Callable[[ClusterJob, Any], Mapping[str, str]]
    submit: Callable[[Path, Any], list[str]]


CONTAINER_RUNS = "/weft/runs"
"""Run folders in containers: the mounted volume or bucket."""
CONTAINER_CONFIG = "/weft/job"
"""The config in containers."""


def size_faults(options: LaunchOptions, mesh: Mesh, device: str) -> Iterator[Fault]:
    """Nodes and GPUs must fit the mesh."""
    ranks = counted(mesh.size, "rank")
    if mesh.size % options.nodes:
        yield Fault(
            "nodes",
            f"does not divide the {ranks} of the mesh {str(mesh)!r}",
            got=str(options.nodes),
            need="as many ranks on every node",
            fix=f"--nodes {_largest_divisor(mesh.size, options.nodes)}, or another --mesh",
        )
        return
    per_node = mesh.size // options.nodes
    gpus = options.gpus_per_node
    if gpus and device == "cpu":
        yield Fault(
            "gpus_per_node",
            "the run uses no GPU (device cpu)",
            str(gpus),
            "0",
            fix="leave gpus_per_node out, or leave device out",
        )
    elif gpus and gpus != per_node:
        size = gpus * options.nodes
        yield Fault(
            "gpus_per_node",
            f"differs from the mesh {str(mesh)!r}",
            got=f"{counted(size, 'GPU')} on {counted(options.nodes, 'node')}",
            need=f"{per_node}, one for each of the {ranks}",
            fix=f"--gpus-per-node {per_node}, or a mesh of {size} such as --mesh dp{size}",
        )


def text_faults(
    options: LaunchOptions, paths: Iterable[Path], words: Iterable[str]
) -> Iterator[Fault]:
    """Names, paths and the options `words` must mean themselves in every job file."""
    if options.name and not NAME.fullmatch(options.name):
        need = "at most 63 letters, digits, dots, hyphens and underscores"
        yield Fault(
            "name", "is not a safe name for a job", repr(options.name), need, fix="--name weft-run"
        )
    for key in words:
        value = str(getattr(options, key))
        if value and not WORD.fullmatch(value):
            need = "one word of letters, digits and ./:@,+=_-"
            yield Fault(
                key,
                "is not a safe value in a job file",
                repr(value),
                need,
                fix=f"--{key} with such a word",
            )
    for path in paths:
        if not PATH.fullmatch(str(path)):
            need = "letters, digits, spaces and /.,:+@=~_-"
            fix = "choose another --out, or start in another folder"
            yield Fault("out", "is not a safe path in a job file", repr(str(path)), need, fix)


def job_name(options: LaunchOptions, out: Path) -> str:
    """The name of the job: as given, else from the run folder."""
    if options.name:
        return options.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.name)[:63].strip("._-")
    return name or "weft"


def num_gpus(options: LaunchOptions, ranks_per_node: int, device: str) -> int:
    """GPUs of each node."""
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    return 0 if device == "cpu" else ranks_per_node


def _largest_divisor(size: int, most: int) -> int:
    return max(number for number in range(1, most + 1) if size % number == 0)
