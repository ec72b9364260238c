"""Owns what a checkpoint says of the run that wrote it, besides its tensors."""

from __future__ import annotations

from collections.abc import Callable

from weft.checkpoint.format import Facts
from weft.config.run import Run
from weft.data.samples import Samples
from weft.train.step import TrainStep

# Note [There is no random state]
# Starting values are drawn from (seed, parameter), the order of the data from (seed, step), what a model writes from
# (seed, place). Nothing that trains draws as it goes, so there is no generator whose state could be saved: the number of
# steps that are done is the whole position. The facts below are there to be checked, not to be restored.


def facts_of(run: Run, step: TrainStep, samples: Samples) -> Callable[[int], Facts]:
    """What the manifest says after so many steps; see Note [There is no random state]."""
    plan, data = step.model.plan.model_dump(mode="json"), samples.facts()

    def after(number: int) -> Facts:
        scale = step.loss_scale
        return Facts(
            step=number,
            seed=run.seed,
            family=run.model.name,
            architecture=run.model.architecture,
            plan=plan,
            run=run.model_dump(mode="json"),
            optimizer=run.optim.model_dump(mode="json"),
            data=data,
            position={"steps": number, "samples": number * run.batch.global_size},
            loss_scale={"value": scale.value, "good_steps": scale.good_steps} if scale.is_dynamic else None,
        )

    return after
