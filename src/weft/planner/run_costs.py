"""Everything that is measured of a run before it starts: costs of its roles, routing, world check, prediction."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.hardware import Hardware
from weft.config.run import Run
from weft.planner.measure import RoleCosts, measure, measure_worst_routing
from weft.planner.predict import Prediction, predict_measured
from weft.planner.speeds import Speeds
from weft.planner.world_check import WorldCheck, check_world


@dataclass(frozen=True)
class RunCosts:
    """All that `weft explain` says of a run besides its layout.

    Attributes:
        roles: with an even load of experts.
        worst: with all tokens on one rank of each expert-parallel group; () without such groups.
        check: of the collectives of the whole world.
        prediction: of the step on a device; None if no device is named.
    """

    roles: tuple[RoleCosts, ...]
    worst: tuple[RoleCosts, ...]
    check: WorldCheck
    prediction: Prediction | None

    @property
    def fullest(self) -> RoleCosts:
        """The role with the largest peak."""
        return max(self.roles, key=lambda role: role.memory.peak)


def run_costs(run: Run, hardware: Hardware | None) -> RunCosts:
    """Measure a run, on a device if there is one.

    Raises:
        PlanError: the run is too large to be measured.
    """
    roles = measure(run)
    prediction = None
    if hardware is not None:
        prediction = predict_measured(roles, Speeds(hardware))
    return RunCosts(
        roles=roles,
        worst=measure_worst_routing(run, roles),
        check=check_world(run, roles),
        prediction=prediction,
    )
