"""Checks of a user's model before any rank starts: its axis table, state outside parameters, randomness, the loss, the layout.

They hold for models of any size. Two builds have the same values. The chain runs without memory at
the run's own sizes, where a forward may do nothing but compute (Note [Effects]); then with values on
two short sequences or images, block by block, where it must compute the same twice, each sequence by
itself, and a loss that is a sum over targets (Note [Trial]). Then each stage of the layout is made
parallel on the meta device, where the transforms reject what would compute other numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.comm.comm import Comm
from weft.comm.transport import MetaTransport
from weft.core.dimension import pipeline_axis, position_axes
from weft.core.model_config import ModelConfig
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.attention import Attend
from weft.models.common.backward_apart import backward_apart
from weft.models.common.batch import Batch
from weft.models.common.buffer_updates import take_parts
from weft.models.common.init import tie
from weft.models.runs_without_memory import run_without_memory
from weft.models.user_facts import axes_faults
from weft.models.user_family import UserFamily, example, meta_blocks
from weft.parallel.context.attend import gathered_blocks
from weft.parallel.context.ulysses import HEADS
from weft.parallel.cp import uneven_heads
from weft.parallel.model.executed_code import ExecutedCode, packages_of
from weft.parallel.model.parallelize import parallelize
from weft.parallel.model.token_ids import NamedIds
from weft.train.block_trial import TrialSizes
from weft.train.build_checks import check_builds
from weft.train.init_from import lazy_blocks
from weft.train.model_effects import (
    Pure,
    check_effects,
    check_gradients,
    check_modules,
    check_updating,
)
from weft.train.model_trial import Trial, lengths_of


def check_user_model(family: Family, config: ModelConfig, plan: Plan) -> None:
    """Reject a model that would compute other numbers on other layouts.

    Raises:
        PlanError: what is wrong, and where.
    """
    assert isinstance(family, UserFamily), "the model of a user"
    with family.model.reads.recorded():
        _check(family, config, plan)


def _check(family: UserFamily, config: ModelConfig, plan: Plan) -> None:
    """All checks, in the order of their costs.

    Raises:
        PlanError: what is wrong, and where.
    """
    shapes = family.facts(config).shapes
    faults = tuple(axes_faults(shapes, family.axes(config)))
    if faults:
        raise PlanError(*faults)
    check_stage_outputs(family, plan)
    with without_openmp(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of trial runs; the ranks show theirs
        check_builds(family, config)
        _check_computation(family, config, plan)
        check_layout(family, config, plan)


def _check_computation(family: UserFamily, config: ModelConfig, plan: Plan) -> None:
    """Reject a forward that does more than compute, or computes other numbers elsewhere.

    Raises:
        PlanError: what it does, and where.
    """
    dtype: torch.dtype = getattr(torch, plan.compute)
    blocks = meta_blocks(family, config)
    tie(blocks, family.ties(config))
    check_modules(blocks, family.model.label)
    check_updating(blocks, plan, family.model.label)
    if plan.statistics_ranks > 1:
        take_parts(blocks)
    for block in blocks.values():
        block.to(dtype)
    pure = Pure(
        family.model.label,
        NamedIds(config.axis_sizes().get("vocab", 0)),
        packages_of(blocks.values()),
    )
    at_run = ExecutedCode(pure.packages)

    def run(blocks: Mapping[str, nn.Module], whole: Batch) -> None:
        for batch in (whole, *_columns(whole, plan)):
            with at_run:
                check_effects(blocks, batch, pure)
        backward_apart(lambda: _check_gradients(blocks, whole, family.model.label))

    whole = example(family, config, rows=plan.micro_size, seq_len=plan.seq_len)
    with _with_even_heads(blocks, plan):
        run_without_memory(run, blocks, whole)
    trial = Trial(family, config, pure)
    short, code = trial.run_short(plan.seq_len)
    trial.run_branches(
        at_run,
        code,
        replace(short, dtype=dtype),
        replace(short, rows=plan.micro_size, length=plan.seq_len),
        TrialSizes(plan.micro_size, plan.seq_len, dtype),
    )


@contextmanager
def _with_even_heads(blocks: Mapping[str, nn.Module], plan: Plan) -> Iterator[None]:
    """While active, the blocks run; at the end, reject heads that Ulysses cannot exchange, whatever tp
    leaves of them. Blocks that work on whole sequences exchange none.

    Raises:
        PlanError: with their number.
    """
    degree = plan.mesh.degree(position_axes()) if plan.context == "ulysses" else 1
    uneven: dict[str, int] = {}
    hooks: list[RemovableHandle] = []

    def noted(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_attend: nn.Module, args: tuple[Tensor, ...]) -> None:
            num_heads = args[0].shape[HEADS]
            if num_heads % degree:
                uneven[name] = num_heads

        return note

    for name, block in blocks.items():
        attentions = [module for module in block.modules() if isinstance(module, Attend)]
        hooks += [each.register_forward_pre_hook(noted(name)) for each in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name in uneven.keys() - (gathered_blocks(blocks, plan) if uneven else {}):
        raise PlanError(uneven_heads(degree, f"{uneven[name]} heads"))


def _check_gradients(blocks: Mapping[str, nn.Module], whole: Batch, label: str) -> None:
    """Check gradients at the shortest length that the model takes.

    Raises:
        PlanError: a parameter that the loss does not use; or its backward fails.
    """
    lengths = lengths_of(whole.inputs.shape[1]) if whole.inputs.dim() == 2 else ()
    for length in lengths[:-1]:
        columns = slice(0, length)
        short = whole.window(columns)
        try:
            return check_gradients(blocks, short, label)
        except PlanError:
            raise
        except Exception:  # noqa: BLE001, S112 - a model of one length
            continue
    return check_gradients(blocks, whole, label)


def _columns(batch: Batch, plan: Plan) -> Iterator[Batch]:
    """The part of the first rank among those that share sequences."""
    degree = plan.mesh.degree(position_axes())
    if degree > 1 and batch.inputs.dim() == 2:
        yield batch.columns(index=0, degree=degree)


def check_stage_outputs(family: UserFamily, plan: Plan) -> None:
    """Reject a pipeline whose stages hand on what cannot be sent.

    Raises:
        PlanError: the first block that does.
    """
    num_parts = plan.mesh.degree(position_axes())
    for stage in plan.stages[:-1]:
        name = f"{family.model.label}: {stage.blocks[-1]}"
        if stage.parts and num_parts > 1:
            what = "hands on several tensors, and under cp a pipeline stage sends one"
            fix = "concatenate them along the last dim, or a mesh without cp or pp"
            raise PlanError(Fault(name, what, fix=fix))
        if not stage.out and not stage.parts:
            what = "hands on something that a pipeline stage cannot send"
            need = "a tensor, or a tuple or dict of tensors of one floating-point type, batch first"
            fix = "return these alone; blocks of later stages can read the batch, too"
            raise PlanError(Fault(name, what, need=need, fix=fix))


def check_layout(family: Family, config: ModelConfig, plan: Plan) -> None:
    """Make each pipeline stage of the layout parallel on the meta device.

    Raises:
        PlanError: a transform rejects the model.
    """
    if plan.mesh.size == 1:
        return
    axis = pipeline_axis()
    has_stages = plan.mesh.degree(axis) > 1
    for index in range(plan.mesh.degree(axis)):
        coordinate = dict.fromkeys((name for name, _ in plan.mesh.axes), 0)
        if has_stages:
            coordinate[axis] = index
        rank = plan.mesh.rank(**coordinate)
        comm = Comm(plan.mesh, rank, MetaTransport(plan.mesh.size, rank))
        parallelize(
            lazy_blocks(family, config),
            plan,
            comm,
            axes=family.axes(config),
            ties=family.ties(config),
            example=family.example(config, plan) if isinstance(family, UserFamily) else None,
        )


@contextmanager
def without_openmp() -> Iterator[None]:
    """Without OpenMP: ranks may be forked from this process later."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
