"""Everything that is measured of a run before it starts: costs of its roles, routing, world check, prediction."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.hardware import Hardware
from weft.core.node_placement import NodePlacement
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.recorder import CallRecorder
from weft.planner.measure.roles import RoleCosts, measure, worst_load
from weft.planner.simulate.order_costs import MeshOrder, mesh_order
from weft.planner.simulate.predict import Prediction, predict_measured
from weft.planner.simulate.speeds import Speeds
from weft.planner.world.world_check import WorldCheck, check_recorded, record_world


@dataclass(frozen=True)
class RunCosts:
    """All that `weft explain` says of a run besides its layout.

    Attributes:
        roles: with an even load of experts.
        worst: with all tokens on one rank of each expert-parallel group; () without such groups.
        check: of the collectives of the whole world.
        prediction: of the step on a device; None if no device is named.
        order: of the axes on nodes of that device; None where one node has all ranks.
    """

    roles: tuple[RoleCosts, ...]
    worst: tuple[RoleCosts, ...]
    check: WorldCheck
    prediction: Prediction | None
    order: MeshOrder | None

    @property
    def fullest(self) -> RoleCosts:
        """The role with the largest peak."""
        return max(self.roles, key=lambda role: role.memory.peak)


def run_costs(run: MeasuredRun, hardware: Hardware | None) -> RunCosts:
    """Measure a run, on a device if there is one.

    Raises:
        PlanError: the run is too large to be measured.
    """
    roles = measure(run)
    load = worst_load(roles)
    worst = () if load is None else measure(run, load=load)

    def record_rank(rank: int) -> RankStep:
        return measure_rank(run, rank, recorder_type=CallRecorder)

    prediction = order = None
    if hardware is not None:
        prediction = predict_measured(roles, Speeds(hardware))
        order = mesh_order(roles, hardware, NodePlacement.even(run.plan.mesh.size, hardware.node))
    return RunCosts(
        roles=roles,
        worst=worst,
        check=check_recorded(record_world(roles, record_rank)),
        prediction=prediction,
        order=order,
    )
