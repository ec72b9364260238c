"""`mesh = "auto"`: the fastest legal mesh for the devices that are there; the other keys of a run stay as they are.

Note [Choice of a mesh]
    The choice is a function of the config, the number of ranks and the kind of device, without
    clocks or random numbers. Of ranks that torchrun or Slurm has started rank 0 chooses for all
    (shared_choice.py). Ranks that weft starts get the choice of the process that starts them. Before a training run layouts are
    measured in a process of their own: a backward starts threads of autograd, which do not survive
    the fork of the ranks, and the meta device loads modules that the ranks do not need.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from weft.checkpoint.folder import FOLDER
from weft.checkpoint.resume import AUTO, starts_new
from weft.commands import environment
from weft.config import toml
from weft.config.checks import Check
from weft.config.hardware import (
    GB,
    Figure,
    Hardware,
    hardware_of_cuda,
    world_faults,
)
from weft.config.load import AUTO_MESH
from weft.config.run import Run, hardware_of
from weft.config.validate import config_checks
from weft.errors import ConfigError, Fault, PlanError, counted
from weft.planner.search.candidates import (
    Candidates,
    LayoutGroup,
    Space,
    candidates,
    nearest_devices,
    reason_of,
)
from weft.planner.search.layout_choice import SEARCHED
from weft.run.forked_answer import FAILURE, ForkedAnswer
from weft.run.world import detect, num_cores
from weft.view.quantity import memory

RUN_FILE = "run.toml"
HEADROOM = 0.1
"""Share of the memory that stays free, as in `weft plan`."""
PINNED = frozenset(SEARCHED - {"mesh"})
"""Keys of the search that stay as they are."""
CORE_TFLOPS, CORE_TB_S, CORE_LINK_GB_S = 0.1, 0.01, 1.0
"""Assumed of a rank on the CPU: they rank layouts, they are no measurement."""


@dataclass(frozen=True)
class ChosenMesh:
    """A mesh, and one line that says why."""

    mesh: str
    note: str


class ChooseMesh(Protocol):
    """Chooses the mesh of a run that is valid apart from it; `is_flag`: --mesh auto is a flag."""

    def __call__(self, run: Run, *, is_flag: bool) -> ChosenMesh: ...


@dataclass(frozen=True)
class DevicesHere:
    """The ranks of a run whose mesh is chosen.

    Attributes:
        num_local: on this machine.
        is_joined: torchrun or Slurm has started them.
        has_gpus: they compute on GPUs.
    """

    num_ranks: int
    num_local: int
    is_joined: bool
    has_gpus: bool


def choose_mesh(run: Run, *, is_flag: bool, before_ranks: bool = False) -> ChosenMesh:
    """The mesh that a resumed run has recorded, unless --mesh is given; else the one with the least
    predicted time of a step. See Note [Choice of a mesh].

    Args:
        before_ranks: ranks are started afterwards.

    Raises:
        UserError: no layout is legal, or fits; the device is unknown; variables of the launcher are
            not valid.
    """
    world = detect(os.environ)
    if world is None:
        return _choose_here(run, is_flag=is_flag, before_ranks=before_ranks)
    from weft.commands.shared_choice import choose_once, shared_store  # late: it imports torch

    store = shared_store(world)
    if store is None:
        return _choose_here(run, is_flag=is_flag, before_ranks=before_ranks)

    def choose() -> dict[str, Any]:
        chosen = _choose_here(run, is_flag=is_flag, before_ranks=before_ranks)
        return asdict(chosen)

    return ChosenMesh(**choose_once(choose, store, world))


def _choose_here(run: Run, *, is_flag: bool, before_ranks: bool) -> ChosenMesh:
    """`choose_mesh` in this process."""
    if not is_flag and run.resume is not None:
        recorded = _recorded(run.resume, run.out)
        if recorded is not None:
            return recorded
    devices = devices_here(run.device, run.nproc)
    hardware = hardware_of(run) or _hardware_here(devices, run.precision.matmul)
    faults = tuple(world_faults(hardware, devices.num_ranks))
    if faults:
        raise ConfigError(*faults)
    space = Space(devices.num_ranks, hardware.node, PINNED)
    found = legal_meshes(run, space)
    if not found.groups:
        raise ConfigError(_no_layout(run, space, found, devices))
    if len(found) == 1:
        mesh = found.groups[0].base.mesh
        return ChosenMesh(mesh, _note(mesh, f"the only legal layout of {_ranks(devices)}"))
    return _fastest(run, found, hardware, devices, before_ranks=before_ranks)


def _recorded(resume: str, out: str | None) -> ChosenMesh | None:
    """The mesh of the run whose checkpoint is resumed."""
    if starts_new(resume, out):
        return None
    named = Path(out or "") if resume == AUTO else Path(resume)
    num_above = 2 if named.parent.name == FOLDER else 1
    for folder in (named, *named.parents[:num_above]):
        path = folder / RUN_FILE
        if not path.is_file():
            continue
        values = toml.read(str(path))
        mesh = str(values.get("mesh", ""))
        if mesh == AUTO_MESH:
            return None
        return ChosenMesh(mesh, _note(mesh, f"as in {path}; --mesh auto chooses anew"))
    return None


def devices_here(device: str, nproc: int | None) -> DevicesHere:
    """The ranks of torchrun or Slurm; else `nproc`, the visible GPUs, or the cores.

    Raises:
        LaunchError: variables of the launcher are missing or contradict each other.
    """
    world = detect(os.environ)
    num_gpus = _num_gpus(device)
    has_gpus = num_gpus > 0
    if world is not None:
        return DevicesHere(world.size, world.local_size, is_joined=True, has_gpus=has_gpus)
    number = nproc or num_gpus or num_cores()
    return DevicesHere(number, number, is_joined=False, has_gpus=has_gpus)


def _num_gpus(device: str) -> int:
    has_files = any(glob.glob(pattern) for pattern in environment.GPU_FILES)
    if device == "cpu" or not has_files:
        return 0
    from weft.run.devices import find_gpus  # late: it imports torch

    return find_gpus().num_visible


def _hardware_here(devices: DevicesHere, matmul: Literal["ieee", "tf32"]) -> Hardware:
    """The device of the GPUs; else a core with assumed speeds."""
    if not devices.has_gpus:
        return assumed_core(devices.num_local)
    from weft.run.devices import gpu_names  # late: it imports torch

    names = gpu_names()
    found = hardware_of_cuda(names[0]) if len(names) == 1 else None
    if found is None:
        what = "auto needs the figures of the GPU, which the table does not have"
        fix = "weft bench compute --write gpu.toml, then --hardware gpu.toml; or name a mesh"
        raise ConfigError(Fault("mesh", what, ", ".join(names) or "unknown", fix=fix))
    return found.for_matmul(matmul)


def assumed_core(num_local: int) -> Hardware:
    """A rank on the CPU: its share of the memory of this machine, and assumed speeds."""
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figures: dict[str, Figure] = {}
    return Hardware(
        name="cpu",
        label="a CPU rank",
        device="cpu",
        node=num_local,
        memory_gb=all_bytes / num_local / GB,
        bf16_tflops=CORE_TFLOPS,
        fp32_tflops=CORE_TFLOPS,
        fp64_tflops=CORE_TFLOPS / 2,
        hbm_tb_s=CORE_TB_S,
        link_gb_s=CORE_LINK_GB_S,
        network_gb_s=CORE_LINK_GB_S,
        figures=figures,
    )


def legal_meshes(run: Run, space: Space) -> Candidates:
    """The candidates that pass every check of the config."""
    found = candidates(run, space)
    groups: list[LayoutGroup] = []
    for group in found.groups:
        changed = run.with_values({"mesh": group.base.mesh})
        reason = _first_reason(config_checks(changed))
        if reason is None:
            groups.append(group)
        else:
            found.illegal[reason] += 1
    return Candidates(groups, found.illegal)


def _first_reason(checks: Iterable[Check]) -> str | None:
    """The reason of the first fault; None where all checks pass."""
    for check in checks:
        for fault in check.find():
            return reason_of(fault)
    return None


def _no_layout(run: Run, space: Space, found: Candidates, devices: DevicesHere) -> Fault:
    """Why no mesh is legal, and the nearest numbers of ranks that have one."""
    reasons = [reason for reason, _ in found.illegal.most_common(2)]
    numbers: list[int] = []
    for number in nearest_devices(run, space):
        nearby = Space(number, space.node, PINNED)
        if legal_meshes(run, nearby).groups:
            numbers.append(number)
    start = "start {} ranks" if devices.is_joined else "--nproc {}"
    fix = " or ".join(start.format(number) for number in numbers)
    what = f"auto finds no legal layout of {_ranks(devices)}"
    return Fault("mesh", what, got="; ".join(reasons), fix=fix or "change the keys named here")


def _fastest(
    run: Run,
    found: Candidates,
    hardware: Hardware,
    devices: DevicesHere,
    *,
    before_ranks: bool,
) -> ChosenMesh:
    """The layout with the least predicted time among those that fit.

    Raises:
        UserError: none fits, or they cannot be measured.
    """
    from weft.planner.search.auto_mesh import rank_meshes  # late: they import torch
    from weft.planner.simulate.speeds import Speeds

    capacity = (1 - HEADROOM) * hardware.memory_bytes
    speeds = Speeds(hardware)

    def ranked() -> tuple[Any, bool, float | None]:
        ranking = rank_meshes(run, found, speeds, capacity)
        return ranking.meshes, ranking.is_complete, ranking.least_bytes

    meshes, is_complete, least_bytes = _apart(ranked) if before_ranks else ranked()
    if not meshes:
        raise ConfigError(_nothing_fits(hardware, devices, capacity, least_bytes))
    layouts = counted(len(found), "legal layout")
    words = [f"of {layouts} of {_ranks(devices)}"]
    best, seconds = meshes[0]
    if len(meshes) > 1:
        other, other_s = meshes[1]
        factor = f"{other_s / seconds:.2g}"
        words.append(f"next best {other}, {factor} times the predicted step")
    else:
        words.append("no other was found that fits")
    if not is_complete:
        words.append("not proven the fastest")
    is_assumed = run.hardware is None and hardware.name == "cpu"
    if is_assumed:
        words.append("speeds of the CPU: assumed")
    else:
        words.append(f"on {hardware.label}, {hardware.efficiency.source}")
    return ChosenMesh(best, _note(best, "; ".join(words)))


def _nothing_fits(
    hardware: Hardware, devices: DevicesHere, capacity: float, least_bytes: float | None
) -> Fault:
    what = f"auto finds no layout of {_ranks(devices)} that fits {hardware.label}"
    least = "" if least_bytes is None else f"at least {memory(least_bytes)} a rank"
    need = f"at most {memory(capacity)}"
    fix = "more ranks, --parallel.zero 1 to 3, --parallel.recompute full, or name a mesh"
    return Fault("mesh", what, got=least, need=need, fix=fix)


def _ranks(devices: DevicesHere) -> str:
    return counted(devices.num_ranks, "rank")


def _note(mesh: str, reason: str) -> str:
    return f"mesh auto -> {mesh or 'one rank'} ({reason})"


def _apart(function: Callable[[], Any]) -> Any:
    """The result of a function as JSON, computed in a fork of this process where one can compute.

    Raises:
        PlanError: the function has failed.
    """
    from weft.run.devices import fork_problem  # late: it imports torch

    if fork_problem():
        return function()
    forked = ForkedAnswer(lambda: {"result": function()})
    try:
        answer = forked.wait()
    finally:
        forked.end()
    if FAILURE in answer:
        what = "auto cannot measure the layouts"
        raise PlanError(Fault("mesh", what, answer[FAILURE], fix="name a mesh: --mesh dp2"))
    return answer["result"]


def choose_before_ranks(run: Run, *, is_flag: bool) -> ChosenMesh:
    """`choose_mesh` for a command that starts ranks."""
    return choose_mesh(run, is_flag=is_flag, before_ranks=True)


def one_rank(run: Run, *, is_flag: bool) -> ChosenMesh:
    """No mesh, for `weft plan`, which searches one itself.

    Raises:
        ConfigError: --mesh auto is given.
    """
    if is_flag:
        what = "auto is what weft plan looks for"
        raise ConfigError(Fault("mesh", what, AUTO_MESH, fix="leave --mesh out"))
    return ChosenMesh("", "")


def not_taken(taking: Collection[str] = ("train", "explain", "simulate", "prove")) -> Fault:
    """`auto` for a command that does not choose a mesh."""
    commands = ", ".join(f"weft {name}" for name in taking)
    what = f"auto is chosen by {commands} alone"
    return Fault("mesh", what, AUTO_MESH, "axes with degrees", "--mesh dp2; see weft plan")
