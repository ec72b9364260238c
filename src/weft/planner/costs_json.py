"""The measured costs of a run as JSON; docs/plan.md lists the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from weft.core.dimension import pipeline_axis
from weft.planner.measure.overlap import Share
from weft.planner.measure.roles import RoleCosts
from weft.planner.run_costs import RunCosts
from weft.planner.simulate.predict import Prediction
from weft.planner.world.call_mismatch import Mismatch
from weft.planner.world.world_check import Problem, WorldCheck


def costs_json(costs: RunCosts) -> dict[str, Any]:
    """Bytes, counts, FLOPs and seconds."""
    fields: dict[str, Any] = {
        "roles": [_role_json(role) for role in costs.roles],
        "worst_routing": [_role_json(role) for role in costs.worst],
        "world_check": _check_json(costs.check),
    }
    if costs.prediction is not None:
        hardware = costs.prediction.speeds.hardware
        peak = costs.fullest.memory.peak
        fields["hardware"] = {
            "name": hardware.name,
            "label": hardware.label,
            "memory_bytes": hardware.memory_bytes,
            "left_bytes": hardware.memory_bytes - peak,
        }
        fields["time"] = _time_json(costs.prediction)
    if costs.order is not None:
        fields["mesh_order"] = costs.order.to_dict()
    return fields


def _role_json(role: RoleCosts) -> dict[str, Any]:
    memory = role.memory
    traffic = []
    for key, total in sorted(role.traffic.items()):
        axis, op = key
        traffic.append(
            {
                "axis": axis,
                "op": op,
                "operations": total.operations,
                "payload_bytes": total.payload_bytes,
                "sent_bytes": total.sent_bytes,
                "overlap": _overlap_json(role.overlap[key]),
            }
        )
    kept = memory.kept
    return {
        pipeline_axis(): role.row,
        "ranks": role.num_ranks,
        "params_bytes": kept.params,
        "gradients_bytes": kept.gradients,
        "optimizer_bytes": kept.optimizer,
        "buffers_bytes": kept.buffers,
        "in_flight_bytes": memory.in_flight,
        "workspace_bytes": memory.workspace,
        "workspace_parts": dict(memory.parts),
        "peak_bytes": memory.peak,
        "peak_at": memory.cause,
        "levels": [[level.name, level.held, level.most] for level in memory.levels],
        "flops": role.flops,
        "traffic": traffic,
    }


def _overlap_json(shares: Mapping[str, Share]) -> dict[str, Any]:
    return {name: asdict(share) for name, share in shares.items()}


def _check_json(check: WorldCheck) -> dict[str, Any]:
    return {
        "holds": not check.problems,
        "ranks": check.num_ranks,
        "ranks_played": check.num_recorded,
        "calls": check.num_calls,
        "messages": check.num_messages,
        "problems": [_problem_json(problem) for problem in check.problems],
    }


def _problem_json(problem: Problem) -> dict[str, Any]:
    kind = "mismatch" if isinstance(problem, Mismatch) else "deadlock"
    return {"kind": kind, **asdict(problem)}


def _time_json(prediction: Prediction) -> dict[str, Any]:
    time = prediction.step
    interval = prediction.step_s
    return {
        "step_s": time.total_s,
        "low_s": interval.low,
        "high_s": interval.high,
        "pipeline_s": time.pipeline_s,
        "reduce_s": time.reduce_s,
        "update_s": time.update_s,
        "exposed_s": dict(time.exposed_s),
        "bubble": time.bubble,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "model_flops": prediction.utilization.flops,
        "efficiency": asdict(prediction.speeds.efficiency),
    }
