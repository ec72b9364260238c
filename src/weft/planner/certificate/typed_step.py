"""One rank's step on the meta device with types; what it ends with is compared with the gradient rule.

Note [A typed step]
    The real step runs once, on the meta device, at its own sizes: every operation of every forward
    and backward is typed (`type_mode`), every collective takes and gives types (`typed_comm`).
    Declared, and so not derived, are: batch and parameters (`declared_tensors`), modules and
    functions whose operations depend on the rank's place (`declared_regions`,
    `watched_functions`). Compared are: what blocks and stages give, loss and norm before they are
    summed, and every gradient after its reduction. Not typed are the update, and the pipeline axis,
    whose ranks hold other blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from weft.core.dimension import local_update_axes, pipeline_axis
from weft.core.mesh import Mesh
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.player import Player
from weft.planner.certificate.axis_types import PARTIAL, AxisType
from weft.planner.certificate.declared_regions import DeclaredRegions
from weft.planner.certificate.declared_tensors import declare_batch, param_types
from weft.planner.certificate.step_comm import StepComm
from weft.planner.certificate.type_mode import KnownCalls, TypeFinding, TypeMode, ValuesNeededError
from weft.planner.certificate.watched_functions import WatchedFunctions
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.played_actions import thinned
from weft.planner.measure.rank_step import dispatches, example_batch
from weft.train.build import build_configured_step
from weft.train.step import TrainStep
from weft.train.step_phases import report_blocks


@dataclass(frozen=True)
class TypedStep:
    """What the types of one rank's step say.

    Attributes:
        rank: world rank.
        num_operations: that were typed.
        num_gradients: that were compared with the gradient rule.
        findings: mismatches and operations without a rule.
    """

    rank: int
    num_operations: int
    num_gradients: int
    findings: tuple[TypeFinding, ...]


def typed_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes along which tensors have types: those of one model replica but the pipeline's, whose
    ranks hold other blocks.
    """
    untyped = (pipeline_axis(), *local_update_axes())
    return tuple(name for name in mesh.wide_axes if name not in untyped)


def typed_step(
    run: MeasuredRun, rank: int, *, microbatches: Sequence[int], known: KnownCalls
) -> TypedStep:
    """Type one step of one rank of a run.

    Args:
        microbatches: of the schedule, that stand for all.
        known: calls of other ranks of the run.
    """
    plan = run.plan
    mode = TypeMode(typed_axes(plan.mesh), known)
    comm = StepComm(
        plan.mesh,
        rank,
        mode=mode,
        shared_results=run.shared_results,
        sequence_parallel=plan.sequence_parallel,
    )
    step = build_configured_step(run.config, plan, comm)
    for _ in dispatches(step):  # all of them have a load that can be assumed
        pass
    step.kl = None  # forwards alone, of which no gradient depends
    table = thinned(plan.table, tuple(microbatches))
    step.player = Player(
        step.model, before_last_backward=step.grads.set_requires_gradient_sync, table=table
    )
    batch = example_batch(run, comm)
    batches = [batch] * table.microbatches
    return _type_step(step, batches, mode)


def _type_step(step: TrainStep, batches: Sequence[Batch], mode: TypeMode) -> TypedStep:
    model = step.model
    comm = model.comm
    assert isinstance(comm, StepComm), "the step was built with it"
    regions = DeclaredRegions(mode, index=comm.index, num_calls=lambda: comm.calls.num_started)
    declare_batch(batches[0], mode)
    for name, param in model.params.items():
        mode.tensors.fix(
            param, param_types(model.shards[name], tuple(param.shape), model, mode.axes)
        )
    for name, block in model.blocks.items():
        regions.wrap(name, block)
        block.register_forward_hook(_check_result(name, mode))
    report_blocks(model.blocks, _Locator(mode))
    for name, param in model.params.items():
        if param.requires_grad:
            param.register_hook(_declare_gradient(name, param, model, mode, regions))
    functions = WatchedFunctions(step, comm, mode)
    with ExitStack() as stack:
        stack.enter_context(functions.watched())
        stack.enter_context(mode)
        # the mode has noted where the step ends
        stack.enter_context(suppress(ValuesNeededError))
        step.compute(batches)
    mode.is_after_backward = True
    num_gradients = sum(1 for _ in _check_gradients(step, mode))
    return TypedStep(
        rank=model.comm.rank,
        num_operations=mode.num_operations,
        num_gradients=num_gradients,
        findings=tuple(mode.findings.values()),
    )


class _Locator:
    """Notes in whose backward an operation is; forwards are located by modules."""

    def __init__(self, mode: TypeMode) -> None:
        self.mode = mode

    def __call__(self, block: str) -> None:
        self.mode.where = f"{block} or its backward"
        self.mode.is_declared = False


def _check_result(name: str, mode: TypeMode) -> Any:
    """A hook: no block gives a tensor that is partial or varying along an axis over which nothing
    is summed later.
    """

    def check(module: nn.Module, args: object, out: Any) -> None:
        x = out[0] if isinstance(out, tuple) else out
        if not isinstance(x, Tensor) or x.dim() == 0:
            return
        for axis, one in zip(mode.axes, mode.types_of(x), strict=True):
            if one.kind == "partial":
                what = "the output is partial and is used as replicated"
                mode.report(axis, what, where=name)
            elif one.kind == "varying":
                mode.report(axis, "the output is varying: ranks differ in it", where=name)

    return check


def _declare_gradient(
    name: str, param: nn.Parameter, model: ParallelModel, mode: TypeMode, regions: DeclaredRegions
) -> Any:
    """A hook for parameters that declared regions read: their gradients are as the rule says."""

    def declare(gradient: Tensor) -> None:
        if id(param) not in regions.declared_params:
            return
        shard = model.shards[name]
        types = []
        for axis, one in zip(mode.axes, mode.types_of(param), strict=True):
            is_summed = axis in shard.reduce_axes
            types.append(PARTIAL if is_summed else one)
        mode.set(gradient, tuple(types))

    return declare


def _check_gradients(step: TrainStep, mode: TypeMode) -> Iterator[str]:
    """Compare every reduced gradient with the rule: sharded as its parameter, else replicated."""
    model = step.model
    has_findings = bool(mode.findings)
    for name, entries in step.grads.sharded_params.items():
        gradient = entries.grad
        if gradient is None:
            continue
        yield name
        shard = model.shards[name]
        sharded_over_ranks = (*shard.shard_axes, *step.grads.shard_axes[name])
        for axis in mode.axes:
            one = mode.type_of(gradient, axis)
            problem = _gradient_problem(one, is_sharded=axis in sharded_over_ranks)
            is_certain = one.kind != "untyped"
            if problem and (is_certain or not has_findings):
                mode.report(
                    axis, f"the gradient of {name} is {problem}", where=name, is_certain=is_certain
                )


def _gradient_problem(one: AxisType, *, is_sharded: bool) -> str:
    """What is wrong with a reduced gradient along an axis; "" if nothing is."""
    match one.kind:
        case "untyped":
            return "not typed"
        case "partial":
            return "partial: it was not summed"
        case "replicated" if is_sharded:
            return "replicated, and its parameter is sharded"
        case "sharded" | "varying" if not is_sharded:
            return f"{one.text}, and its parameter is replicated: ranks would update it apart"
    return ""
