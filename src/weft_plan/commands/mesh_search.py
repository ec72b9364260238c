"""The legal meshes of a run on the devices that are there, and the one with the least predicted time of a step."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.config.hardware import GB, Figure, Hardware, hardware_of_cuda
from weft.config.layout_keys import LayoutKeys
from weft.config.rules.checks import Check
from weft.config.rules.config_checks import config_checks
from weft.config.rules.sections import bandwidths_are_known
from weft.config.run import Run, hardware_of, recompute_of
from weft.core.node_placement import NodePlacement
from weft.errors import ConfigError, Fault, PlanError, counted
from weft.layout.recomputation import KEY as RECOMPUTE
from weft.layout.recomputation import is_chosen_by_memory
from weft.run.forked_answer import FAILURE, ForkedAnswer
from weft.run.launcher_nodes import placement_of
from weft.run.world import detect, num_cores
from weft.start import environment
from weft.start.auto_mesh import ChosenMesh
from weft.view.quantity import memory
from weft_plan.search.candidates import (
    RECOMPUTES,
    Candidates,
    LayoutGroup,
    Space,
    candidates,
    nearest_devices,
    reason_of,
)
from weft_plan.search.layout_choice import SEARCHED

HEADROOM = 0.1
"""Share of the memory that stays free, as in `weft plan`."""
PINNED = frozenset(SEARCHED - {"mesh"})
"""Keys of the search that stay as they are."""
CORE_TFLOPS, CORE_TB_S, CORE_LINK_GB_S = 0.1, 0.01, 1.0
"""Assumed of a rank on the CPU: they rank layouts, they are no measurement."""


def fastest_mesh(run: Run, *, before_ranks: bool) -> ChosenMesh:
    """The mesh with the least predicted time of a step on the devices that are here.

    Args:
        before_ranks: ranks are started afterwards.

    Raises:
        UserError: no layout is legal, or fits; the device is unknown; variables of the launcher are
            not valid.
    """
    devices = devices_here(run.device, run.nproc)
    hardware = hardware_of(run) or hardware_here(devices, run.precision.matmul)
    hardware = on_nodes(hardware, devices.placement)
    faults = tuple(bandwidths_are_known(hardware, devices.num_ranks))
    if faults:
        raise ConfigError(*faults)
    pinned = PINNED
    if is_chosen_by_memory(run.parallel.recompute) or recompute_of(run).uniform not in RECOMPUTES:
        run = run.with_values({RECOMPUTE: "none"})  # layouts have any, the same of all layers
        pinned = PINNED - {RECOMPUTE}
    return MeshSearch(run, hardware, devices, pinned).choose(before_ranks=before_ranks)


@dataclass(frozen=True)
class DevicesHere:
    """The ranks of a run whose mesh is chosen.

    Attributes:
        num_local: on this machine.
        is_joined: torchrun or Slurm has started them.
        has_gpus: they compute on GPUs.
        placement: of ranks that are joined, where the launcher says it.
    """

    num_ranks: int
    num_local: int
    is_joined: bool
    has_gpus: bool
    placement: NodePlacement | None = None


def devices_here(device: str, nproc: int | None) -> DevicesHere:
    """The ranks of torchrun or Slurm; else `nproc`, the visible GPUs, or the cores.

    Raises:
        LaunchError: variables of the launcher are missing or contradict each other.
    """
    world = detect(os.environ)
    num_gpus = _num_gpus(device)
    has_gpus = num_gpus > 0
    if world is not None:
        return DevicesHere(
            world.size,
            world.local_size,
            is_joined=True,
            has_gpus=has_gpus,
            placement=placement_of(os.environ, world),
        )
    number = nproc or num_gpus or num_cores()
    return DevicesHere(number, number, is_joined=False, has_gpus=has_gpus)


def _num_gpus(device: str) -> int:
    has_files = any(glob.glob(pattern) for pattern in environment.GPU_FILES)
    if device == "cpu" or not has_files:
        return 0
    from weft.run.devices import find_gpus  # late: it imports torch

    return find_gpus().num_visible


def hardware_here(devices: DevicesHere, matmul: Literal["ieee", "tf32"]) -> Hardware:
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


def on_nodes(hardware: Hardware, placement: NodePlacement | None) -> Hardware:
    """The hardware whose nodes have as many ranks as the launcher has put on them."""
    if placement is None:
        return hardware
    return replace(hardware, node=max(placement.counts))


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


@dataclass(frozen=True)
class MeshSearch:
    """The choice among the legal meshes of a run.

    Attributes:
        run: valid apart from its mesh.
        devices: that a mesh fills.
        pinned: keys whose values stay.
    """

    run: Run
    hardware: Hardware
    devices: DevicesHere
    pinned: frozenset[str] = PINNED

    def choose(self, *, before_ranks: bool) -> ChosenMesh:
        """The mesh with the least predicted time of a step.

        Raises:
            UserError: no layout is legal, or fits, or they cannot be measured.
        """
        found = self.legal_meshes(self.devices.num_ranks)
        if not found.groups:
            raise ConfigError(self._no_layout(found))
        if len({group.base.mesh for group in found.groups}) == 1:
            mesh = found.groups[0].base.mesh
            return ChosenMesh.because(mesh, f"the only legal layout of {_ranks(self.devices)}")
        return self._fastest(found, before_ranks=before_ranks)

    def legal_meshes(self, num_ranks: int) -> Candidates:
        """The candidates on a number of ranks that pass every check of the config."""
        found = candidates(LayoutKeys.of(self.run), self._space(num_ranks))
        groups: list[LayoutGroup] = []
        for group in found.groups:
            changed = self.run.with_values({"mesh": group.base.mesh})
            reason = _first_reason(config_checks(changed))
            if reason is None:
                groups.append(group)
            else:
                found.illegal[reason] += 1
        return Candidates(groups, found.illegal)

    def _space(self, num_ranks: int) -> Space:
        return Space(num_ranks, self.hardware.node, self.pinned)

    def _no_layout(self, found: Candidates) -> Fault:
        """Why no mesh is legal, and the nearest numbers of ranks that have one."""
        reasons = [reason for reason, _ in found.illegal.most_common(2)]
        start = "start {} ranks" if self.devices.is_joined else "--nproc {}"
        fixes: list[str] = [
            start.format(number)
            for number in nearest_devices(
                LayoutKeys.of(self.run), self._space(self.devices.num_ranks)
            )
            if self.legal_meshes(number).groups
        ]
        return Fault(
            "mesh",
            f"auto finds no legal layout of {_ranks(self.devices)}",
            got="; ".join(reasons),
            fix=" or ".join(fixes) or "change the keys named here",
        )

    def _fastest(self, found: Candidates, *, before_ranks: bool) -> ChosenMesh:
        """The layout with the least predicted time among those that fit."""
        from weft.planner.measure.measured_run import MeasuredRun  # late: they import torch
        from weft.planner.simulate.speeds import Speeds
        from weft_plan.search.auto_mesh import rank_meshes

        hardware = self.hardware
        capacity = (1 - HEADROOM) * hardware.memory_bytes
        speeds = Speeds(hardware, self.devices.placement)

        def ranked() -> tuple[Any, bool, float | None]:
            ranking = rank_meshes(MeasuredRun.of(self.run), found, speeds, capacity)
            return ranking.meshes, ranking.is_complete, ranking.least_bytes

        meshes, is_complete, least_bytes = _apart(ranked) if before_ranks else ranked()
        if not meshes:
            raise ConfigError(_nothing_fits(hardware, self.devices, capacity, least_bytes))
        layouts = counted(len(found), "legal layout")
        reasons = [f"of {layouts} of {_ranks(self.devices)}", _second_best(meshes)]
        if not is_complete:
            reasons.append("not proven the fastest")
        is_assumed = self.run.hardware is None and hardware.name == "cpu"
        if is_assumed:
            reasons.append("speeds of the CPU: assumed")
        else:
            reasons.append(f"on {hardware.label}, {hardware.efficiency.source}")
        mesh, _ = meshes[0]
        return ChosenMesh.because(mesh, "; ".join(reasons))


def _first_reason(checks: Iterable[Check]) -> str | None:
    """The reason of the first fault; None where all checks pass."""
    for check in checks:
        for fault in check.find():
            return reason_of(fault)
    return None


def _second_best(meshes: Sequence[tuple[str, float]]) -> str:
    """How much slower the mesh after the best one is, of meshes with their seconds."""
    if len(meshes) == 1:
        return "no other was found that fits"
    (_, best_s), (second, second_s) = meshes[:2]
    factor = f"{second_s / best_s:.2g}"
    return f"next best {second}, {factor} times the predicted step"


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
