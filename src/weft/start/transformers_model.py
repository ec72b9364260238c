"""What a run of a decoder of transformers needs before it starts: a comparison with transformers, and axes to shard."""

from __future__ import annotations

from weft.config.run import Run, plan_of
from weft.core.dimension import activation_axes
from weft.models import FAMILIES
from weft.models.transformers.architectures import is_architecture_name, model_type_of


def prepared(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run with the axes that its layout can shard, and what is said of them.

    They are found once, by the first process that reads the config, and stored in it: a resume or
    another rank shards alike.

    Raises:
        UserError: the architecture is no chain that computes what transformers does.
    """
    if not is_architecture_name(run.model.name):
        return run, ()
    from weft.models.transformers.axes import axes_text  # they import torch
    from weft.models.transformers.sizes import AXES
    from weft.models.transformers.check import check_against_transformers
    from weft.models.user_family import UserFamily
    from weft.train.propose_axes import propose

    family = FAMILIES[run.model.name]
    assert isinstance(family, UserFamily), "made by weft.models.transformers"
    values = dict(vars(family.user_config(run.model)))
    stored = values.pop(AXES)
    note = check_against_transformers(model_type_of(run.model.name), values)
    notes = [f"{run.model.name}: {note}"] if note else []
    plan = plan_of(run)
    if plan.mesh.degree(activation_axes()) == 1 or stored:
        return run, tuple(notes)
    proposal = propose(family, run.model, plan)
    for part, reason in proposal.undecided.items():
        notes.append(f"{run.model.name}: whole on every rank: {part}: {reason}")
    return run.with_values({f"model.{AXES}": axes_text(proposal.table)}), tuple(notes)
