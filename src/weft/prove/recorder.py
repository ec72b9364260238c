"""Recorder of a training run on one rank, by hooks on modules, tensors and phases; it changes no number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.checkpoint.state import MODEL, param_states
from weft.comm.observe import Operation
from weft.core.axes import Box
from weft.core.dimension import plain_data_axes
from weft.models.common.batch import Batch, Extra, activation_of
from weft.parallel.model.parallelize import ParallelModel, ParamShard
from weft.prove.places import FlatPlace, Place, RankPlaces, ShardPlace
from weft.prove.record import (
    BlockLoad,
    BlockNumber,
    Observed,
    PartialGradient,
    RankRecord,
    Site,
    rated_steps,
)
from weft.prove.report import Phase
from weft.run.rank_status import Phase as StepPhase
from weft.train.data_loader import DataLoader
from weft.train.step import TrainStep
from weft.train.training import Training

REDUCTIONS = ("all_reduce", "reduce_scatter")


GATHERS = ("all_gather",)


class OperationTrace:
    """Observer of a `Comm` that keeps the newest operation of each kind and axis."""

    def __init__(self) -> None:
        self.newest: Operation | None = None
        self._newest_of: dict[tuple[str, str], Operation] = {}

    def started(self, op: Operation) -> None:
        """Keep the newest operation."""
        self.newest = op
        self._newest_of[op.op, op.axis] = op

    def finished(self, op: Operation) -> None:
        """Do nothing: the start of an operation is what is kept."""

    def reduction(self, axes: tuple[str, ...]) -> Operation | None:
        """The newest reduction over these axes; the newest operation where there is none."""
        joined_axes = "+".join(axes)
        for kind in REDUCTIONS:
            found = self._newest_of.get((kind, joined_axes))
            if found is not None:
                return found
        return self.newest

    def gather(self) -> Operation | None:
        """The newest all-gather over the axis that was gathered over first; the newest operation where
        there is none.
        """
        # With sharded parameters that axis is theirs: they are gathered before the first block runs.
        for (kind, _), operation in self._newest_of.items():
            if kind in GATHERS:
                return operation
        return self.newest


@dataclass(frozen=True)
class RecordingLoader(DataLoader):
    """A data loader that reports the micro-batches that it returns."""

    on_batches: Callable[[int, list[Batch]], None] = lambda step, batches: None

    def batches(self, step: int) -> list[Batch]:
        """The loader's own batches, recorded."""
        batches = super().batches(step)
        self.on_batches(step, batches)
        return batches


class _MicroBatch(NamedTuple):
    step: int
    number: int


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
        self.places = self._rank_places(training)
        self._number = training.step_range.start + 1
        self._place_of_batch: dict[int, _MicroBatch] = {}
        self._kept: list[list[Batch]] = []
        self._current: _MicroBatch | None = None
        self._names_of: dict[int, list[str]] = {}
        self._calls: Counter[tuple[int, _MicroBatch]] = Counter()
        self._read_params: set[tuple[int, str]] = set()
        self._name_of_param: dict[int, str] = {}
        for name, param in self.model.params.items():
            self._name_of_param[id(param)] = name
        self._ended: set[int] = set()
        self._scale = 1.0
        of_buffers = {
            name: ParamShard.of_buffer(name, tuple(buffer.shape))
            for name, buffer in self.model.buffer_records.buffers().items()
        }
        record.shards = {**self.model.shards, **of_buffers}
        record.progress.has_begun = True

    def _rank_places(self, training: Training) -> RankPlaces:
        """Where micro-batches of this rank lie in the global batch."""
        plan = self.model.plan
        num_runs = 1
        if self.step.fixed_order and plan.zero < 2:
            num_runs = plan.mesh.degree(plain_data_axes())
        samples_are_images = hasattr(training.loader.samples, "pairs")
        return RankPlaces(
            plan, self.model.comm.rank, has_columns=not samples_are_images, num_runs=num_runs
        )

    def attach(self, training: Training) -> Training:
        """The training run with this recorder's hooks."""
        comm = self.model.comm
        comm.observers = (*comm.observers, self.trace)
        for name, block in self.model.blocks.items():
            self._hook_block(name, block)
        for name, param in self.model.params.items():
            if param.requires_grad:
                param.register_hook(partial(self._on_param_gradient, name))
        schedule = training.step_range
        for step in rated_steps(schedule.total):
            self.record.rates[step] = schedule.learning_rate(step - 1)
        loader = RecordingLoader(**vars(training.loader), on_batches=self._on_batches)
        return replace(training, loader=loader, on_phase=self.on_phase)

    def _hook_block(self, name: str, block: nn.Module) -> None:
        """Hook a module once, also if it is several blocks."""
        is_known = id(block) in self._names_of
        names = self._names_of.setdefault(id(block), [])
        names.append(name)
        if is_known:
            return
        # The micro-batch has to be known before hooks of the layout gather parameters or receive
        # activations; the parameters themselves are read after those.
        block.register_forward_pre_hook(self._before_forward, prepend=True)
        block.register_forward_pre_hook(self._read_parameters)
        block.register_forward_hook(self._after_forward)

    def handle(self, event: Mapping[str, Any]) -> None:
        """Keep an event; as a view of the event log."""
        self.record.events.append(dict(event))

    def close(self) -> None:
        """Do nothing: no file is open."""

    # batches

    def _on_batches(self, index: int, batches: list[Batch]) -> None:
        self._kept.append(batches)
        for number, batch in enumerate(batches):
            self._place_of_batch[id(batch)] = _MicroBatch(index + 1, number)
            for name, tensor in batch.tensors().items():
                self._keep_input(index + 1, number, name, tensor)

    def _keep_input(self, step: int, micro_batch: int, name: str, tensor: Tensor) -> None:
        site = Site(step, "batch", block="", tensor=name, micro_batch=micro_batch)
        place = self.places.micro_batch(
            micro_batch, tensor.shape, whole_columns=name == "whole_documents"
        )
        self._keep(site, tensor, place, None)

    # forward and backward

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._current = None
        if len(args) > 1:
            batch = args[1]
            self._current = self._place_of_batch.get(id(batch))
        self.record.progress.block = self._block_name(module, count=False)

    def _block_name(self, module: nn.Module, *, count: bool) -> str:
        """The block's name; of a module that is several blocks, the one whose turn it is."""
        names = self._names_of[id(module)]
        if len(names) == 1 or self._current is None:
            return names[0]
        key = (id(module), self._current)
        turn = self._calls[key] % len(names)
        if count:
            self._calls[key] += 1
        return names[turn]

    def _read_parameters(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the parameters as the block uses them, once a step."""
        if self._current is None:
            return
        step = self._current.step
        block = self._block_name(module, count=False)
        if (step, block) in self._read_params:
            return
        self._read_params.add((step, block))
        for param in module.parameters():
            name = self._name_of_param.get(id(param))
            if name is None:
                continue
            shard = self.model.shards[name]
            site = Site(
                step, "forward", block, tensor=f"{shard.owner} as used", parameter=shard.owner
            )
            self._keep(site, param, ShardPlace(shard.shard), self.trace.gather())

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.record.progress.block = ""
        if self._current is None:
            return
        step = self._current.step
        block = self._block_name(module, count=True)
        if isinstance(output, Extra):
            self._add_sum(step, block, "extra loss", output.loss)
            self._add_load(step, block, output.load)
        x = activation_of(output)
        if not isinstance(x, Tensor):
            return
        if x.dim() == 0:
            self._add_sum(step, block, "loss", x)
        else:
            self._keep_output(self._current, block, x)

    def _keep_output(self, current: _MicroBatch, block: str, x: Tensor) -> None:
        """Record the output of a block, and its gradient once that is computed."""
        place = self.places.micro_batch(current.number, x.shape)
        site = Site(
            current.step, "forward", block, tensor=f"{block}.output", micro_batch=current.number
        )
        self._keep(site, x, place, self.trace.newest)
        if not x.requires_grad:
            return
        gradient_site = replace(site, phase="backward", tensor=f"{block}.output gradient")

        def keep(gradient: Tensor) -> None:
            unscaled = gradient.double() / self._scale
            self._keep(gradient_site, unscaled, place, self.trace.newest)

        x.register_hook(keep)

    def _add_sum(self, step: int, block: str, name: str, value: Tensor | None) -> None:
        if value is None:
            return
        key = BlockNumber(step, block, name)
        number = float(value.detach().double())
        before = self.record.sums.get(key, 0.0)
        self.record.sums[key] = before + number
        self.record.sum_types[key] = value.dtype
        self.record.sum_operations[key] = self.trace.newest

    def _add_load(self, step: int, block: str, load: Tensor | None) -> None:
        if load is None:
            return
        key = BlockLoad(step, block)
        before = self.record.loads.get(key)
        self.record.loads[key] = load.clone() if before is None else before + load

    def _on_param_gradient(self, name: str, gradient: Tensor) -> None:
        """Add what one backward yields for a parameter."""
        key = (self._number, name)
        value = gradient.detach().double() / self._scale
        # The hook of a parameter is called in every backward, so once for each micro-batch, before anything is reduced.
        before = self.record.partial_gradients.get(key)
        if before is not None:
            value = before.value + value
        shard = self.model.shards[name]
        self.record.partial_gradients[key] = PartialGradient(shard, value, self.trace.newest)

    # between backward and the next step

    def on_phase(self, number: int, phase: StepPhase) -> None:
        """Called with every phase of the training loop."""
        self._number = number
        progress = self.record.progress
        progress.step = number
        progress.phase = phase
        progress.block = ""
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
            boxes = shard.shard.boxes_of_range(start, stop)
            if phase == "reduce":
                title = f"{shard.owner} gradient"
                dtype = sum_dtypes.get(name)
            else:
                title = f"{shard.owner} clipped gradient"
                dtype = tensor.grad.dtype
            site = Site.of_parameter(self._number, phase, shard.owner, title)
            flat = tensor.grad.detach().double().reshape(-1)
            self.record.values[site] = Observed(
                value=flat / scale,
                place=FlatPlace(boxes),
                operation=self.trace.reduction(shard.reduce_axes),
                dtype=dtype,
            )

    def _sum_dtypes(self) -> dict[str, torch.dtype]:
        """In which dtype the gradient of each parameter is accumulated and reduced."""
        found: dict[str, torch.dtype] = {}
        for group in self.step.grads.trained_groups:
            dtype = group.policy.reduce
            if group.unsharded_grad is not None:
                dtype = group.unsharded_grad.dtype
            found.update(dict.fromkeys(group.params, dtype))
        return found

    def record_state(self, number: int, *, moments: Phase, params: Phase) -> None:
        """Record parameters and optimizer state after step `number`."""
        # The very states that a checkpoint gets, so that what a rank would save is what is compared.
        for stored in param_states(self.step.state()):
            local = stored.dequantized()
            owner = local.param.owner
            place = FlatPlace(local.boxes)
            for section, tensor in local.tensors.items():
                if section == MODEL:
                    site = Site.of_parameter(number, params, owner, owner)
                else:
                    site = _moment_site(number, moments, owner, section)
                    tensor = local.decoded(section)
                self._keep_flat(site, tensor, place)
            for section, tensor in local.whole.items():
                site = _moment_site(number, moments, owner, section)
                all_entries = Box.whole(tuple(tensor.shape))
                self._keep_flat(site, tensor, FlatPlace((all_entries,)))

    def _keep_flat(self, site: Site, tensor: Tensor, place: FlatPlace) -> None:
        flat = tensor.detach().reshape(-1)
        self._keep(site, flat, place, self.trace.newest)

    def _keep(self, site: Site, value: Tensor, place: Place, operation: Operation | None) -> None:
        # Optimizers and operations in place change the tensor itself, and the comparison follows the whole run.
        copy = value.detach().clone()
        self.record.values[site] = Observed(copy, place, operation, value.dtype)


def _moment_site(step: int, phase: Phase, parameter: str, section: str) -> Site:
    """The site of an optimizer state, whose section of a checkpoint is `optim/KEY`."""
    key = section.partition("/")[2]
    return Site.of_parameter(step, phase, parameter, f"{parameter} {key}")
