"""What a run of a decoder of transformers needs before it starts: a comparison with transformers, and axes to shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.hf.architectures import is_architecture_name, model_type_of
from weft.config.run import Run, plan_of
from weft.core.dimension import activation_axes, position_axes
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig, logical_axes
from weft.core.shard import shard_of
from weft.errors import Fault, PlanError, counted
from weft.models import FAMILIES
from weft.parallel.tp import AXIS as TP

LARGEST_WHOLE = {"bfloat16": 2**8, "float16": 2**11}
"""Type -> the number up to which it has all whole ones."""


def prepared(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run with the axes that its layout can shard, and what is said of them.

    Raises:
        UserError: the architecture is no chain that computes what transformers does.
    """
    if not is_architecture_name(run.model.name):
        return run, ()
    from weft.train.model_checks import without_openmp  # it imports torch

    with without_openmp():
        return _prepared(run)


def _prepared(run: Run) -> tuple[Run, tuple[str, ...]]:
    from weft.data.record_sources import packs_documents
    from weft.models.transformers.sizes import AXES

    family: Any = FAMILIES[run.model.name]
    values = dict(vars(family.user_config(run.model)))
    stored = values.pop(AXES)
    packs = run.data.packing != "single" and packs_documents(run.data)
    model_type = model_type_of(run.model.name)
    _check_context(model_type, values)
    _check_whole_numbers(run, model_type, values)
    notes = list(_notes(model_type, values, packs_documents=packs))
    if run.precision.linears == "fp8":
        notes += _experts_not_in_fp8(run, family.facts(run.model).shapes)
    if not stored and plan_of(run).mesh.degree(activation_axes()) > 1:
        run, whole = _with_axes(run)
        notes += whole
    if run.lora.quantize != "none":
        _check_blocks(run)
    if plan_of(run).sequence_parallel:
        notes += _on_whole_sequences(run)
    if plan_of(run).mesh.degree(position_axes()) > 1:
        notes += _on_whole_sequences_under_cp(run)
    return run, tuple(f"{run.model.name}: {note}" for note in notes)


def _check_context(model_type: str, values: Mapping[str, Any]) -> None:
    """Check that a longrope model is trained within its original context, whose tables it has.

    Raises:
        PlanError: it is not.
    """
    from weft.models.transformers.build import architecture_of, longrope  # they import torch

    rope = longrope(vars(architecture_of(model_type, values).config))
    context, longest = rope.get("original_max_position_embeddings"), values.get("max_seq_len", 0)
    if context and longest > context:
        what = "longer than the original context of longrope, whose tables are used"
        fix = f"--model.max_seq_len {context}"
        fault = Fault("model.max_seq_len", what, str(longest), f"at most {context}", fix)
        raise PlanError(fault)


def _check_whole_numbers(run: Run, model_type: str, values: Mapping[str, Any]) -> None:
    """Check that the types of the run hold the numbers of experts that a folder has for each token.

    Raises:
        PlanError: one does not.
    """
    from weft.models.transformers.build import architecture_of  # it imports torch

    experts = values.get("experts", 0)
    types = {name: getattr(run.precision, name) for name in ("params", "compute")}
    is_too_narrow = any(experts > LARGEST_WHOLE.get(dtype, experts) for dtype in types.values())
    if is_too_narrow and architecture_of(model_type, values).integers:
        what = f"does not hold the numbers of {experts} experts, of which each token has some"
        name, dtype = next((k, v) for k, v in types.items() if v in LARGEST_WHOLE)
        fix = f"--precision.{name} float32"
        raise PlanError(Fault(f"precision.{name}", what, got=dtype, need="float32", fix=fix))


def _check_blocks(run: Run) -> None:
    """Check that no rank of tp holds a part of a block of a row in 4 bits.

    Raises:
        PlanError: one does.
    """
    from weft.models.common.nf4 import check_borders  # it imports torch

    plan = plan_of(run)
    double = run.lora.quantize == "nf4_double"
    axes = FAMILIES[run.model.name].axes(run.model)
    mesh = Mesh.parse(f"{TP}{plan.mesh.degree(TP)}")
    for linear, shape in run.model.linears().items():
        name = f"{linear}.weight"
        logical = logical_axes(name, axes)
        for rank in range(mesh.size):
            shard = shard_of(name, shape, logical, rule=plan.sharding_rule, mesh=mesh, rank=rank)
            check_borders(name, shard, shape[1], dim=1, double=double)


def _experts_not_in_fp8(run: Run, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """The experts that the model multiplies itself, not by transformers' interface."""
    number, inside = run.model.architecture.get("experts"), run.model.expert_linears()
    for name, shape in shapes.items():
        is_stack = len(shape) == 3 and shape[0] == number and min(shape) > 1
        if is_stack and name not in inside:
            leaf = name.partition(".")[2]
            yield f"its routed experts, {leaf} among them, compute in {run.precision.compute}, not in fp8"
            return


def _notes(model_type: str, values: Mapping[str, Any], *, packs_documents: bool) -> Iterator[str]:
    """Noise, clips and parameters that are left out, and a comparison that could not be made."""
    from weft.models.transformers.build import architecture_of, clips_of, noise_of  # torch
    from weft.models.transformers.check import check_against_transformers
    from weft.models.transformers.sizes import SETTINGS, balance_losses

    settings = json.loads(values[SETTINGS] or "{}")
    found = architecture_of(model_type, values)
    for what, left_out in (
        ("a loss for an even load of experts", balance_losses(vars(found.config))),
        ("random noise", noise_of(model_type, settings)),
        ("parameters clipped within the forward", clips_of(settings)),
    ):
        if left_out:
            names = ", ".join(f"{name} {value:g}" for name, value in left_out.items())
            yield f"trained without {what} (config.json: {names})"
    if found.untrained:
        names = counted(len(found.untrained), "parameter")
        yield f"not trained, as no gradient reaches them: {names} (such as {min(found.untrained)})"
    note = check_against_transformers(model_type, values, packs_documents=packs_documents)
    if note:
        yield note


def _on_whole_sequences(run: Run) -> Iterator[str]:
    """The blocks that sequence parallelism leaves as they are, merged by their numbers, and why."""
    from weft.models.common.init import tie  # they import torch
    from weft.models.user_family import UserFamily, example, meta_blocks
    from weft.parallel.model.chain import PlainChain
    from weft.parallel.tensor.transform import regions_of

    family = FAMILIES[run.model.name]
    assert isinstance(family, UserFamily), "made by weft.models.transformers"
    plan = plan_of(run)
    blocks = meta_blocks(family, run.model)
    tie(blocks, family.ties(run.model))
    batch = example(family, run.model, rows=plan.micro_size, seq_len=plan.seq_len)
    try:
        regions = regions_of(PlainChain(blocks, batch), plan, axes=family.axes(run.model))
    except PlanError:
        return  # the checks of the layout say why
    reasons: dict[str, str] = {}
    for name, how in regions.findings.whole.items():
        reasons.setdefault(name.rstrip("0123456789"), how.reason)
    for kind, reason in reasons.items():
        name = f"{kind}*" if kind == "layer" else kind
        yield f"sequence parallelism: {name} works on whole sequences: {reason}"


def _on_whole_sequences_under_cp(run: Run) -> Iterator[str]:
    """The blocks that context parallelism leaves as they are, and why."""
    from weft.models.user_family import UserFamily, meta_blocks  # they import torch
    from weft.parallel.context.attend import gathered_blocks

    family = FAMILIES[run.model.name]
    assert isinstance(family, UserFamily), "made by weft.models.transformers"
    blocks = meta_blocks(family, run.model)
    try:
        found = gathered_blocks(blocks, plan_of(run))
    except PlanError:
        return  # the checks of the layout say why
    by_part: dict[tuple[str, str], list[str]] = {}
    for name, how in found.items():
        by_part.setdefault((how.reason.partition(":")[0], how.part), []).append(name)
    for (reason, part), names in by_part.items():
        where = f"{len(names)} of {len(blocks)} blocks ({names[0]}{', ...' * (len(names) > 1)})"
        if part:
            where = f"{part} in {where}"
        yield (
            f"context parallelism: {where} on whole sequences, in memory and time of a mesh "
            f"without cp: {reason}"
        )


def _with_axes(run: Run) -> tuple[Run, list[str]]:
    """The run with axes found by tracing, and what is whole on every rank.

    They are stored in the config: a resume or another rank shards alike.
    """
    from weft.models.transformers.axis_rows import axes_text  # they import torch
    from weft.models.transformers.sizes import AXES
    from weft.models.user_facts import rows_of
    from weft.models.user_family import UserFamily
    from weft.train.propose_axes import Table, propose

    def with_table(model: ModelConfig, table: Table) -> ModelConfig:
        return model.model_copy(update={AXES: axes_text(table)})

    family = FAMILIES[run.model.name]
    assert isinstance(family, UserFamily), "made by weft.models.transformers"
    # without sequence parallelism, under which no group is accepted without the others
    plan = plan_of(run).model_copy(update={"sequence_parallel": False})
    proposal = propose(family, run.model, plan, with_table=with_table)
    table = dict(proposal.table)
    for alias, owner in family.ties(run.model).items():  # a table of a user has one row for both
        for pattern in rows_of(owner, proposal.table):
            table[alias] = proposal.table[pattern]
    text = axes_text(table)
    whole = [
        f"whole on every rank: {part}: {reason.partition(' Fix: ')[0]}"
        for part, reason in proposal.undecided.items()
    ]
    if not any(name.startswith("layer") for name in json.loads(text)):
        whole.append("no linear of its layers is sharded: each rank computes them whole")
    return run.with_values({f"model.{AXES}": text}), whole
