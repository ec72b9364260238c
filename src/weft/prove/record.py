"""Recorder of a training run on one rank: batches, activations, gradients, parameters and moments, in order of execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.state import MODEL, param_states
from weft.comm.observe import Operation
from weft.core.axes import Box
from weft.core.dimension import data_axis
from weft.models.common.batch import Batch, Extra
from weft.parallel.model.parallelize import ParallelModel, ParamShard
from weft.prove.places import FlatPlace, Place, RankPlaces, ShardPlace
from weft.prove.report import Phase
from weft.run.rank_status import Phase as StepPhase
from weft.train.data_loader import DataLoader
from weft.train.loop import Event, Training
from weft.train.step import TrainStep

REDUCTIONS = ("all_reduce", "reduce_scatter")
GATHERS = ("all_gather",)


@dataclass(frozen=True)
class Site:
    """What a tensor is: step (from 1), phase, block, logical name, and micro-batch."""

    step: int
    phase: Phase
    block: str
    tensor: str
    parameter: str = ""
    micro_batch: int | None = None


@dataclass(frozen=True)
class Observed:
    """A tensor of one rank, its place in the logical tensor, the operation before it, and the dtype
    in which the rank held it; of a reduced gradient that of the sum.
    """

    value: Tensor
    place: Place
    operation: Operation | None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PartialGradient:
    """The gradient that this rank's own tokens gave a parameter in one step, over all micro-batches."""

    param: ParamShard
    value: Tensor
    operation: Operation | None


@dataclass
class RecordProgress:
    """Where a rank is in its run.

    Attributes:
        step: the newest that began, from 1; 0 before.
        block: the one that runs forward; "" between blocks and in other phases.
        has_begun: whether the model was built.
        is_restoring: whether a checkpoint is read back.
    """

    step: int = 0
    phase: StepPhase = "start"
    block: str = ""
    has_begun: bool = False
    is_restoring: bool = False


@dataclass
class RankRecord:
    """What one rank computed.

    Attributes:
        values: tensors by what they are.
        partial_gradients: (step, parameter) -> gradient before its reduction.
        sums: (step, block, name) -> number of this rank's own tokens: losses, extra losses.
        sum_operations: the operation before each of them.
        loads: (step, block) -> tokens of this rank at each expert.
        shards: geometry of the parameters here.
        events: events of the run.
        norm_operations: the newest operation before the update, by step.
        resumed_after: step after which a checkpoint was read back.
        progress: where the rank is, or was when an error ended its run.
        error: that error.
    """

    rank: int
    values: dict[Site, Observed] = field(default_factory=dict)
    partial_gradients: dict[tuple[int, str], PartialGradient] = field(default_factory=dict)
    sums: dict[tuple[int, str, str], float] = field(default_factory=dict)
    sum_operations: dict[tuple[int, str, str], Operation | None] = field(default_factory=dict)
    loads: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    shards: Mapping[str, ParamShard] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    norm_operations: dict[int, Operation | None] = field(default_factory=dict)
    resumed_after: int | None = None
    progress: RecordProgress = field(default_factory=RecordProgress)
    error: BaseException | None = None


class OperationTrace:
    """Observer of a `Comm` that keeps the newest operation of each kind and axis."""

    def __init__(self) -> None:
        self.newest: Operation | None = None
        self._newest_of: dict[tuple[str, str], Operation] = {}

    def started(self, op: Operation) -> None:
        """Keep it."""
        self.newest = op
        self._newest_of[op.op, op.axis] = op

    def finished(self, op: Operation) -> None:
        """Nothing."""

    def reduction(self, axes: tuple[str, ...]) -> Operation | None:
        """The newest reduction over these axes; the newest operation where there is none."""
        for kind in REDUCTIONS:
            found = self._newest_of.get((kind, "+".join(axes)))
            if found is not None:
                return found
        return self.newest

    def gather(self) -> Operation | None:
        """The newest all-gather over an axis of the mesh; the newest operation where there is none."""
        for (kind, _), operation in self._newest_of.items():
            if kind in GATHERS:
                return operation
        return self.newest


@dataclass(frozen=True)
class RecordingLoader(DataLoader):
    """A data loader that reports the micro-batches that it returns."""

    on_batches: Callable[[int, list[Batch]], None] = lambda step, batches: None

    def batches(self, step: int) -> list[Batch]:
        """As the loader's own."""
        batches = super().batches(step)
        self.on_batches(step, batches)
        return batches


class Recorder:
    """Observes a training run by hooks on modules, tensors and phases; it changes no number.

    Args:
        record: what it writes into.
    """

    def __init__(self, record: RankRecord, training: Training) -> None:
        self.record = record
        self.step: TrainStep = training.step
        self.model: ParallelModel = training.step.model
        self.trace = OperationTrace()
        kind_has_columns = not hasattr(training.loader.samples, "pairs")
        plan = self.model.plan
        takes_consecutive = self.step.fixed_order and plan.zero < 2
        self.places = RankPlaces(
            plan,
            self.model.comm.rank,
            kind_has_columns,
            num_runs=plan.mesh.degree(data_axis()) if takes_consecutive else 1,
        )
        self._number = training.step_range.start + 1
        self._place_of_batch: dict[int, tuple[int, int]] = {}
        self._kept: list[list[Batch]] = []
        self._current: tuple[int, int] | None = None
        self._names_of: dict[int, list[str]] = {}
        self._calls: Counter[tuple[int, int, int]] = Counter()
        self._read_params: set[tuple[int, str]] = set()
        self._name_of_param = {id(param): name for name, param in self.model.params.items()}
        self._ended: set[int] = set()
        self._scale = 1.0
        record.shards = self.model.shards
        record.progress.has_begun = True

    def attach(self, training: Training) -> Training:
        """The training run with this recorder's hooks."""
        comm = self.model.comm
        comm.observers = (*comm.observers, self.trace)
        for name, block in self.model.blocks.items():
            self._names_of.setdefault(id(block), []).append(name)
        seen: set[int] = set()
        for block in self.model.blocks.values():
            if id(block) in seen:
                continue
            seen.add(id(block))
            block.register_forward_pre_hook(self._before_forward, prepend=True)
            block.register_forward_pre_hook(self._read_parameters)
            block.register_forward_hook(self._after_forward)
        for name, param in self.model.params.items():
            if param.requires_grad:
                param.register_hook(partial(self._on_param_gradient, name))
        loader = RecordingLoader(**vars(training.loader), on_batches=self._on_batches)
        return replace(training, loader=loader, on_phase=self.on_phase)

    def handle(self, event: Mapping[str, Any]) -> None:
        """Keep an event; as a view of the event log."""
        self.record.events.append(dict(event))

    def close(self) -> None:
        """Nothing."""

    # batches

    def _on_batches(self, index: int, batches: list[Batch]) -> None:
        self._kept.append(batches)
        for number, batch in enumerate(batches):
            self._place_of_batch[id(batch)] = (index + 1, number)
            for name, tensor in vars(batch).items():
                if tensor is None:
                    continue
                site = Site(index + 1, "batch", "", name, micro_batch=number)
                whole_columns = name == "whole_documents"
                place = self.places.micro_batch(number, tensor.shape, whole_columns=whole_columns)
                self._keep(site, tensor, place, None)

    # forward and backward

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        batch = args[1] if len(args) > 1 else None
        self._current = self._place_of_batch.get(id(batch))
        self.record.progress.block = self._block_name(module, count=False)

    def _block_name(self, module: nn.Module, *, count: bool) -> str:
        """The block's name; of a module that is several blocks, the one whose turn it is."""
        names = self._names_of[id(module)]
        if len(names) == 1 or self._current is None:
            return names[0]
        key = (id(module), *self._current)
        name = names[self._calls[key] % len(names)]
        if count:
            self._calls[key] += 1
        return name

    def _read_parameters(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the parameters as the block uses them, once a step."""
        if self._current is None:
            return
        step, _ = self._current
        block = self._block_name(module, count=False)
        if (step, block) in self._read_params:
            return
        self._read_params.add((step, block))
        for param in module.parameters():
            name = self._name_of_param.get(id(param))
            if name is None:
                continue
            shard = self.model.shards[name]
            site = Site(step, "forward", block, f"{shard.owner} as used", shard.owner)
            self._keep(site, param, ShardPlace(shard.shard), self.trace.gather())

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.record.progress.block = ""
        if self._current is None:
            return
        step, micro_batch = self._current
        block = self._block_name(module, count=True)
        x = output.x if isinstance(output, Extra) else output
        if isinstance(output, Extra):
            self._add_sum(step, block, "extra loss", output.loss)
            self._add_load(step, block, output.load)
        if not isinstance(x, Tensor):
            return
        if x.dim() == 0:
            self._add_sum(step, block, "loss", x)
            return
        place = self.places.micro_batch(micro_batch, x.shape)
        site = Site(step, "forward", block, f"{block}.output", micro_batch=micro_batch)
        self._keep(site, x, place, self.trace.newest)
        if x.requires_grad:
            self._record_gradient(step, block, micro_batch, place, x)

    def _record_gradient(
        self, step: int, block: str, micro_batch: int, place: Place, x: Tensor
    ) -> None:
        name = f"{block}.output gradient"
        site = Site(step, "backward", block, name, micro_batch=micro_batch)

        def keep(gradient: Tensor) -> None:
            self._keep(site, gradient.double() / self._scale, place, self.trace.newest)

        x.register_hook(keep)

    def _add_sum(self, step: int, block: str, name: str, value: Tensor | None) -> None:
        if value is not None:
            key = (step, block, name)
            before = self.record.sums.get(key, 0.0)
            self.record.sums[key] = before + float(value.detach().double())
            self.record.sum_operations[key] = self.trace.newest

    def _add_load(self, step: int, block: str, load: Tensor | None) -> None:
        if load is not None:
            before = self.record.loads.get((step, block), torch.zeros_like(load))
            self.record.loads[step, block] = before + load

    def _on_param_gradient(self, name: str, gradient: Tensor) -> None:
        """Add what one backward yields for a parameter."""
        key = (self._number, name)
        before = self.record.partial_gradients.get(key)
        value = gradient.detach().double() / self._scale
        if before is not None:
            value = before.value + value
        shard = self.model.shards[name]
        self.record.partial_gradients[key] = PartialGradient(shard, value, self.trace.newest)

    # between backward and the next step

    def on_phase(self, number: int, phase: StepPhase) -> None:
        """Called with every phase of the training loop."""
        self._number = number
        progress = self.record.progress
        progress.step, progress.phase, progress.block = number, phase, ""
        if phase == "data":
            self._scale = self.step.loss_scale.value
        elif phase == "update":
            self.record.norm_operations[number] = self.trace.newest
            self._record_gradients("reduce", scale=self._scale)
        elif phase == "end" and number not in self._ended:
            self._ended.add(number)
            self._record_gradients("clip", scale=1.0)
            self.record_state(number, moments="moments", params="update")

    def _record_gradients(self, phase: Phase, *, scale: float) -> None:
        """Record the reduced gradients, before or after clipping."""
        grads = self.step.grads
        sum_dtypes = self._sum_dtypes()
        for name, tensor in grads.sharded_params.items():
            if tensor.grad is None or not self.model.params[name].requires_grad:
                continue
            shard = self.model.shards[name]
            start, stop = grads.shard_ranges[name]
            place = FlatPlace(shard.shard.boxes_of_range(start, stop))
            suffix = "gradient" if phase == "reduce" else "clipped gradient"
            title = f"{shard.owner} {suffix}"
            site = Site(self._number, phase, block_of(shard.owner), title, shard.owner)
            value = tensor.grad.detach().double().reshape(-1) / scale
            dtype = sum_dtypes.get(name) if phase == "reduce" else tensor.grad.dtype
            operation = self.trace.reduction(shard.reduce_axes)
            self.record.values[site] = Observed(value, place, operation, dtype)

    def _sum_dtypes(self) -> dict[str, torch.dtype]:
        """In which dtype the gradient of each parameter is accumulated and reduced."""
        found = {}
        for group in self.step.grads.trained_groups:
            dtype = group.policy.reduce
            if group.unsharded_grad is not None:
                dtype = group.unsharded_grad.dtype
            for name in group.params:
                found[name] = dtype
        return found

    def record_state(self, number: int, *, moments: Phase, params: Phase) -> None:
        """Record parameters and optimizer state after step `number`."""
        for local in param_states(self.step.state()):
            owner = local.param.owner
            block = block_of(owner)
            place = FlatPlace(local.boxes)
            for section, tensor in local.tensors.items():
                phase = params if section == MODEL else moments
                title = owner if section == MODEL else f"{owner} {section.partition('/')[2]}"
                site = Site(number, phase, block, title, owner)
                self._keep(site, tensor.detach().reshape(-1), place, self.trace.newest)
            for section, tensor in local.whole.items():
                title = f"{owner} {section.partition('/')[2]}"
                site = Site(number, moments, block, title, owner)
                all_entries = FlatPlace((Box.whole(tuple(tensor.shape)),))
                self._keep(site, tensor.detach().reshape(-1), all_entries, self.trace.newest)

    def _keep(self, site: Site, value: Tensor, place: Place, operation: Operation | None) -> None:
        copy = value.detach().clone()
        self.record.values[site] = Observed(copy, place, operation, value.dtype)


def block_of(parameter: str) -> str:
    """The block of a parameter."""
    return parameter.partition(".")[0]
