"""Owns the way from a run config to its plan."""

from __future__ import annotations

from weft.config.schema import Run
from weft.layout.plan import Plan, canonical, make_stages


def plan_of(run: Run) -> Plan:
    """The plan that this config asks for.

    Raises:
        PlanError: more stages than layers, or a split that does not add up.
    """
    blocks = run.model.block_specs(run.data.seq_len)
    return Plan(
        mesh=run.grid,
        family=run.model.name,
        architecture=canonical(run.model.architecture),
        stages=make_stages(blocks, run.num_stages, split=run.pipeline.split),
        schedule=run.pipeline.schedule,
        chunks=run.pipeline.chunks,
        microbatches=run.num_micro,
        micro_size=run.batch.micro_size,
        seq_len=run.data.seq_len,
        sequence_parallel=run.parallel.sequence,
        context=run.parallel.context,
        zero=run.parallel.zero,
        recompute=run.parallel.recompute,
        params=run.precision.params,
        compute=run.precision.compute,
        reduce=run.precision.reduce,
        clip=run.optim.clip,
    )
