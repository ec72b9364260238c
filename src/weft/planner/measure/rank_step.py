"""One rank's training step on the meta device: the real model, transforms, schedule row, reduction and optimizer.

See Note [A step in regions] in `played_actions`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.state import param_states
from weft.comm.comm import Comm
from weft.comm.transport import SharedMetaTransport
from weft.core.attention_choice import KernelChoice
from weft.core.dimension import pipeline_axis, position_axes
from weft.core.expert_choice import ExpertKernelChoice
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.layout.utilization import ALL_TRAINED, AdapterFlops
from weft.models.common.batch import Batch, example_of, token_example
from weft.models.common.experts import Dispatch, PlannedKernels
from weft.models.common.head_output import ChunkedLosses, set_head_output
from weft.models.common.moe import MoE
from weft.models.common.uncompiled import keep_compiler_unimported
from weft.parallel.context.attend import whole_sequence_attentions
from weft.parallel.ep import AXIS as EP
from weft.parallel.expert.dispatch import (
    ExpertLoad,
    ExpertParallelDispatch,
    MetaLoadedDispatch,
    even_load,
)
from weft.parallel.model.dropout_blocks import block_as_written
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer, forward_table
from weft.parallel.pipeline.player import Player, PlayResult
from weft.parallel.recompute.blocks import OffloadedBlock
from weft.parallel.zero.param_group import ParamGroup
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.played_actions import (
    ActionKey,
    PlayedAction,
    action_keys,
    played_microbatches,
    thinned,
)
from weft.planner.measure.recorder import (
    Parts,
    RecordedRegion,
    StepRecorder,
    fused_kernels_on_meta,
    storage_bytes,
    storages,
)
from weft.run.rank_status import Phase
from weft.schedule.actions import Act, Table
from weft.schedule.lower import Program, lower
from weft.train.build import build_configured_step
from weft.train.step import TrainStep
from weft.train.step_phases import report_blocks

META = torch.device("meta")


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a rank holds between steps.

    Attributes:
        params: that modules compute with, besides those that ZeRO 3 gathers; and the values that
            the optimizer updates, where those are others.
        gradients: that stay allocated.
        optimizer: states.
        buffers: of modules.
    """

    params: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.params + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class RankStep:
    """What one step of one rank holds, computes and sends.

    Attributes:
        plan: of the run; its table is the whole one.
        rank: world rank.
        row: its pipeline coordinate.
        kept: between steps.
        actions: of the schedule.
        phases: before, between and after the actions: "targets", "reduce", "update".
        played: the table whose actions were recorded.
        regions: all that were recorded, in order, those between actions too.
        in_fixed_order: regions of the played actions themselves, where gradients are added in a
            fixed order; else none.
        num_dispatches: layers of the rank that send tokens to experts of other ranks.
        outer_bytes: message of the rank to each other site in an outer step, which is no part of
            the recorded step; 0 without sites.
        checkpoint_bytes: this rank's part of a checkpoint; replicas divide what they all hold.
        adapted: FLOPs of frozen weights and adapters.
        attention: kernels of attention over whole sequences, and why they are chosen.
        experts: kernels of the products of experts, and why they are chosen.
        estimates_kl: whether a step begins with forwards of all micro-batches that estimate z0; they
            are taken for those that were recorded.
    """

    plan: Plan
    rank: int
    row: int
    kept: KeptBytes
    actions: Mapping[ActionKey, RecordedRegion]
    phases: Mapping[str, RecordedRegion]
    played: Table
    regions: tuple[RecordedRegion, ...]
    num_dispatches: int
    in_fixed_order: Mapping[PlayedAction, RecordedRegion] = field(default_factory=dict)
    outer_bytes: int = 0
    checkpoint_bytes: float = 0.0
    adapted: AdapterFlops = ALL_TRAINED
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    estimates_kl: bool = False

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """What pipeline ranks play in a step: the schedule, before it forwards alone that estimate z0."""
        if not self.estimates_kl:
            return (self.plan.program,)
        return lower(forward_table(self.plan.table)), self.plan.program

    def times_of_key(self, row: int) -> Counter[ActionKey]:
        """How often a pipeline coordinate plays each kind of action in a step."""
        keys = action_keys(self.plan.table, row)
        return Counter(keys[act] for program in self.programs for act in program.table.rows[row])

    def of_equal_blocks(self, plan: Plan) -> RankStep:
        """The step with the names of another plan, whose stages have equal blocks at equal places."""
        names: dict[str, str] = {"": ""}
        for own, other in zip(self.plan.stages, plan.stages, strict=True):
            names.update(zip(own.blocks, other.blocks, strict=True))

        def renamed(region: RecordedRegion) -> RecordedRegion:
            segments = [replace(each, block=names[each.block]) for each in region.segments]
            return replace(region, peak_block=names[region.peak_block], segments=segments)

        return replace(
            self,
            plan=plan,
            actions={key: renamed(region) for key, region in self.actions.items()},
            phases={name: renamed(region) for name, region in self.phases.items()},
            in_fixed_order={key: renamed(each) for key, each in self.in_fixed_order.items()},
            regions=tuple(map(renamed, self.regions)),
        )


def example_batch(run: MeasuredRun, comm: Comm) -> Batch:
    """A micro-batch of this rank on the meta device."""
    model = run.config.model
    plan = run.plan
    if model.kind != "tokens":
        return example_of(model, plan.micro_size, plan.seq_len)
    whole = token_example(plan.micro_size, plan.seq_len)
    tokens_BS = whole.inputs
    if run.fields.documents:
        whole = replace(whole, documents=torch.zeros_like(tokens_BS))
    if run.fields.pairs:
        whole = replace(whole, pairs=torch.zeros_like(tokens_BS, dtype=torch.bool))
    if run.fields.references:
        whole = replace(whole, references=torch.zeros_like(tokens_BS, dtype=torch.float64))
    if not model.reads_later_targets:
        whole = replace(whole, next_inputs=None, later_targets=None)
    axes = position_axes()
    return whole.columns(index=comm.index(axes), degree=comm.degree(axes))


def measure_rank(
    run: MeasuredRun,
    rank: int,
    *,
    load: ExpertLoad = even_load,
    recorder_type: type[StepRecorder] = StepRecorder,
) -> RankStep:
    """One step of one rank of a run, on the meta device.

    The first step allocates what stays allocated; the second one is recorded.

    Args:
        load: of experts that are sharded over ep; without ep it changes nothing.
        recorder_type: `CallRecorder` for collectives and messages alone: bytes and kernels are then
            not counted.
    """
    keep_compiler_unimported()
    plan = run.plan
    shared = run.shared_results
    transport = SharedMetaTransport(plan.mesh.size, rank, shared_results=shared)
    comm = Comm(plan.mesh, rank, transport)
    step = build_configured_step(run.config, plan, comm)
    kernels: dict[KernelChoice, None] = {}
    for attention in whole_sequence_attentions(step.model.blocks.values()):
        attention.device = run.attention_device
        attention.on_choice = kernels.setdefault
    for module in modules_as_written(step):
        output = getattr(module, "head_output", None)
        if isinstance(output, ChunkedLosses):
            set_head_output(module, replace(output, is_for_gpu=run.is_for_gpu))
    for dispatch in dispatches(step):
        dispatch.meta_load = load
    products: dict[ExpertKernelChoice, None] = {}
    planned = PlannedKernels(run.expert_device, products.setdefault)
    for module in modules_as_written(step):
        if isinstance(module, (Dispatch, ExpertParallelDispatch)):
            module.planned = planned
    row = plan.mesh.index(rank, pipeline_axis())
    chosen = played_microbatches(plan.table, row, fixed_order=run.config.fixed_order)
    played = thinned(plan.table, chosen)
    batch = example_batch(run, comm)
    batches = [batch] * played.microbatches
    recorded = record_step(
        step, batches, table=played, recorder_type=recorder_type, is_for_gpu=run.is_for_gpu
    )
    return replace(
        recorded,
        adapted=run.adapted,
        attention=tuple(map(str, kernels)),
        experts=tuple(map(str, products)),
    )


def modules_as_written(step: TrainStep) -> Iterator[nn.Module]:
    """All modules of a step's blocks, without what wraps blocks."""
    for block in step.model.blocks.values():
        yield from block_as_written(block).modules()


def dispatches(step: TrainStep) -> Iterator[MetaLoadedDispatch]:
    """Where tokens of a rank are sent to experts of other ranks.

    Raises:
        PlanError: a mixture under ep has another dispatch, whose load cannot be assumed.
    """
    if step.model.comm.degree(EP) == 1:
        return
    for name, block in step.model.blocks.items():
        for path, module in block_as_written(block).named_modules():
            if isinstance(module, MetaLoadedDispatch):
                yield module
            elif isinstance(module, MoE):
                _check_dispatch(module, f"{name}.{path}")


def _check_dispatch(mixture: MoE, path: str) -> None:
    """Raise `PlanError` where no load of the experts can be assumed."""
    dispatch = mixture.dispatch
    if isinstance(dispatch, MetaLoadedDispatch):
        return
    fault = Fault(
        f"{path}.dispatch",
        f"{type(dispatch).__name__} has no `meta_load`",
        need="the load of experts that is assumed on the meta device",
        fix="see weft.parallel.expert.dispatch.MetaLoadedDispatch",
    )
    raise PlanError(fault)


def record_step(
    step: TrainStep,
    batches: list[Batch],
    *,
    table: Table,
    recorder_type: type[StepRecorder] = StepRecorder,
    is_for_gpu: bool = False,
) -> RankStep:
    """Record one step of one rank, on the meta device or a real one; every rank must call it.

    Args:
        batches: this rank's micro-batches, as many as the table has.
        table: with the plan's stages.
        is_for_gpu: whose kernels the meta device stands for.
    """
    model = step.model
    comm = model.comm
    recorder = recorder_type(comm.device, parts=_parts_of(step))
    marker = _Marker(recorder)
    sync = step.grads.set_requires_gradient_sync
    one_microbatch = thinned(table, (0,))
    step.player = Player(model, before_last_backward=sync, table=one_microbatch)
    recorded_player = _RecordedPlayer(
        model, recorder, before_last_backward=sync, on_action=marker.on_action, table=table
    )
    report_blocks(model.blocks, recorder.on_block)
    forwards = step.kl.player if step.kl is not None else None
    if step.kl is not None:
        step.kl.player = _NoForwards(model)
    with fused_kernels_on_meta(is_for_gpu=is_for_gpu), recorder:
        step(batches[:1], lr=1.0)
        step.player = recorded_player
        kept = _kept_tensors(step)
        recorder.keep(tensor for tensors in kept.values() for tensor in tensors)
        resized = _gathered_params(step)
        recorder.resized_bytes = lambda: storage_bytes(resized)
        recorder.under_way_bytes = _under_way_of(step)
        recorder.offloaded = _offloaded(step)
        observers = comm.observers
        comm.observers = (*observers, recorder)
        recorder.begin("targets")
        step(batches, lr=1.0, on_phase=marker.on_phase)
        recorder.end()
        comm.observers = observers
    if step.kl is not None and forwards is not None:
        step.kl.player = forwards
    sizes = {name: storage_bytes(tensors) for name, tensors in kept.items()}
    row = comm.index(pipeline_axis())
    by_name = {region.name: region for region in recorder.regions}
    keys = action_keys(table, row)
    in_fixed_order: dict[PlayedAction, RecordedRegion] = {}
    if step.fixed_order:
        for act, key in keys.items():
            in_fixed_order[PlayedAction(act.kind, key.chunk, act.mb)] = by_name[str(act)]
    return RankStep(
        plan=model.plan,
        rank=comm.rank,
        row=row,
        kept=KeptBytes(**sizes),
        actions=_by_key(by_name, keys),
        in_fixed_order=in_fixed_order,
        phases={region.name: region for region in recorder.regions if region.name.isalpha()},
        played=table,
        regions=tuple(recorder.regions),
        num_dispatches=sum(1 for _ in dispatches(step)),
        outer_bytes=step.local_updates.wire.num_bytes if step.local_updates else 0,
        checkpoint_bytes=_checkpoint_bytes(step),
        estimates_kl=step.kl is not None,
    )


class _NoForwards(ForwardPlayer):
    """The pass that estimates z0 without its forwards, which `RankStep.programs` counts."""

    def losses(self, batches: Sequence[Batch]) -> tuple[Tensor, ...]:
        zero = torch.zeros((), dtype=torch.float64, device=self.model.comm.device)
        return (zero,) * len(batches)


class _RecordedPlayer(Player):
    """A player whose receives before the first action are a region of their own.

    Its sends are waited for at the end, so that no region depends on how many sends there were
    before; `step_memory` replays when they are waited for in the whole step.
    """

    def __init__(self, model: ParallelModel, recorder: StepRecorder, **options: Any) -> None:
        super().__init__(model, **options)
        self.max_sends = sys.maxsize
        self.recorder = recorder

    def play(self, batches: Sequence[Batch], seed: Tensor, **options: Any) -> PlayResult:
        self.recorder.begin("before actions")
        return super().play(batches, seed, **options)


class _Marker:
    """Marks the regions of a recorder by the callbacks of a step.

    A phase callback comes before each action, without its name; the action's own comes after it.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder
        self.is_first = True

    def on_phase(self, phase: Phase) -> None:
        if self.is_first:  # the step begins: targets are counted
            self.is_first = False
            return
        self.recorder.begin(str(phase))

    def on_action(self, act: Act) -> None:
        self.recorder.rename(str(act))
        self.recorder.begin(f"after {act}")


def _by_key(
    by_name: Mapping[str, RecordedRegion], keys: Mapping[Act, ActionKey]
) -> dict[ActionKey, RecordedRegion]:
    """The recorded regions of actions by the keys of the actions."""
    found = {}
    for act, key in keys.items():
        found[key] = by_name[str(act)]
    return found


def kept_bytes(step: TrainStep) -> int:
    """Bytes that a rank holds between steps; memory that several share counts once."""
    kept = _kept_tensors(step).values()
    return storage_bytes([tensor for tensors in kept for tensor in tensors])


def _kept_tensors(step: TrainStep) -> dict[str, list[Tensor]]:
    """What a rank holds between steps, by the fields of `KeptBytes`, without gathered parameters."""
    model = step.model
    sharded = list(step.grads.sharded_params.values())
    params = [*model.params.values(), *_params_of_groups(step), *sharded]
    gradients: list[Tensor] = []
    for group in step.grads.groups:
        gradients.extend(_gradients(group))
    gradients.extend(
        tensor.grad for tensor in (*sharded, *model.params.values()) if tensor.grad is not None
    )
    optimizer: list[Tensor] = []
    for state in step.state().optimizer_state.values():
        optimizer.extend(state.values())
    optimizer.extend(_outer(step))
    gathered = set(storages(_gathered_params(step)))
    buffers: list[Tensor] = []
    for block in model.blocks.values():
        buffers.extend(block.buffers())
    return {
        "params": [tensor for tensor in params if tensor.untyped_storage()._cdata not in gathered],
        "gradients": gradients,
        "optimizer": optimizer,
        "buffers": buffers,
    }


def _params_of_groups(step: TrainStep) -> list[Tensor]:
    """Flat parameters of groups that are sharded, or unsharded between steps."""
    gathered = {id(tensor) for tensor in _gathered_params(step)}
    found: list[Tensor] = []
    for group in step.grads.groups:
        unsharded = group.unsharded_params
        if unsharded is not None and id(unsharded.flat) not in gathered:
            found.append(unsharded.flat)
        found += group.held
    return found


def _outer(step: TrainStep) -> list[Tensor]:
    """Outer parameters and their momentum, of a run over sites."""
    if step.local_updates is None:
        return []
    outer = step.local_updates.outer
    return [outer.params, outer.momentum]


def _checkpoint_bytes(step: TrainStep) -> float:
    held = 0.0
    for state in param_states(step.state()):
        if state.is_alias:
            continue
        tensors = (*state.tensors.values(), *state.of_blocks.values())
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        held += num_bytes / state.num_replicas
    return held


def _gradients(group: ParamGroup) -> list[Tensor]:
    """The gradients that a group holds now."""
    held = (group.sharded_grad, group.unsharded_grad)
    return [grad for grad in held if grad is not None]


def _gathered_params(step: TrainStep) -> list[Tensor]:
    """Parameters that ZeRO 3 allocates and frees during a step."""
    return [
        group.unsharded_params.flat
        for group in step.grads.groups
        if group.reshards and group.unsharded_params is not None
    ]


def _under_way_of(step: TrainStep) -> Callable[[], int]:
    """A function for the bytes of the reductions that are under way at the moment of a call: of
    the whole gradients, and of this rank's shards of their sums.
    """
    groups = [group for group in step.grads.trained_groups if not group.policy.keeps_unsharded_grad]

    def under_way_bytes() -> int:
        return sum(group.reducing_bytes for group in groups)

    return under_way_bytes


def _offloaded(step: TrainStep) -> Callable[[], tuple[int, int]]:
    """A function for the bytes of activations on the host, and those copied so far, at a call."""
    blocks = step.model.blocks.values()
    chains = {block.chain for block in blocks if isinstance(block, OffloadedBlock)}
    return lambda: (
        sum(chain.host_bytes for chain in chains),
        sum(chain.copied_bytes for chain in chains),
    )


def _parts_of(step: TrainStep) -> Callable[[], Parts]:
    """A function for the bytes of the buffers that ZeRO has allocated at the moment of a call.

    Which groups allocate some is decided here, as it does not change and the function is called at
    each new peak.
    """
    resharding = [group for group in step.grads.groups if group.reshards]
    reducing = [
        group for group in step.grads.trained_groups if not group.policy.keeps_unsharded_grad
    ]

    def parts() -> Parts:
        gathered: list[Tensor] = [
            group.unsharded_params.flat
            for group in resharding
            if group.unsharded_params is not None
        ]
        gradients = [group.unsharded_grad for group in reducing if group.unsharded_grad is not None]
        return {
            "gathered parameters": storage_bytes(gathered),
            "gradients being reduced": storage_bytes(gradients),
        }

    return parts
