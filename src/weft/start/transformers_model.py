"""What a run of a decoder of transformers needs before it starts: a comparison with transformers, and axes to shard."""

from __future__ import annotations

from weft.config.run import Run, plan_of
from weft.core.dimension import activation_axes
from weft.core.model_config import ModelConfig
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
    from weft.train.propose_axes import Table, propose

    family = FAMILIES[run.model.name]
    assert isinstance(family, UserFamily), "made by weft.models.transformers"
    values = dict(vars(family.user_config(run.model)))
    stored = values.pop(AXES)
    note = check_against_transformers(model_type_of(run.model.name), values)
    notes = [f"{run.model.name}: {note}"] if note else []
    plan = plan_of(run)
    if plan.mesh.degree(activation_axes()) == 1 or stored:
        return run, tuple(notes)
    # without sequence parallelism, under which no group is accepted without the others
    whole = plan.model_copy(update={"sequence_parallel": False})

    def with_table(model: ModelConfig, table: Table) -> ModelConfig:
        return model.model_copy(update={AXES: axes_text(table)})

    proposal = propose(family, run.model, whole, with_table=with_table)
    for part, reason in proposal.undecided.items():
        why = reason.partition(" Fix: ")[0]
        notes.append(f"{run.model.name}: whole on every rank: {part}: {why}")
    return run.with_values({f"model.{AXES}": axes_text(proposal.table)}), tuple(notes)
