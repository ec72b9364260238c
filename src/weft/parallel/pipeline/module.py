"""`PipelineParallel`: any sequence of modules over pipeline ranks, in a plain script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import data_axes, local_update_axis, span
from weft.core.mesh import Mesh
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan, Stage
from weft.models.common.batch import Batch
from weft.models.common.uncompiled import keep_compiler_unimported
from weft.parallel.autograd.clipping import clip_to, total_norm
from weft.parallel.autograd.holders import shard_axes_of
from weft.parallel.autograd.rank_part import part_of
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.model.buffers import BufferBroadcast, broadcast_first
from weft.parallel.model.chain import copied_without_memory
from weft.parallel.model.parallelize import ParallelModel, parallelize
from weft.parallel.pipeline.packing import Packing, call_block, packing_of
from weft.parallel.pipeline.player import Player
from weft.parallel.pipeline.state_entries import state_entries, tensors_of
from weft.parallel.pp import AXIS as PP
from weft.parallel.zero.buckets import bucket_reducer
from weft.parallel.zero.global_mean import nonzero
from weft.parallel.zero.grad_norm import sum_tied_gradients
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.wrapped_params import (
    check_not_wrapped,
    check_state,
    mark_wrapped,
    reject_pickle,
)
from weft.schedule.catalog import find, lines_of

LossOf = Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor | float]]


class PipelineParallel(nn.Module):
    """Any chain of modules over the pipeline axis (and, if the mesh has one, the data axis).

        pipe = weft.PipelineParallel(blocks, comm, loss=F.mse_loss, example=x[:4], microbatches=8)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        loss = pipe.step(x, y)        # forwards and backwards of all micro-batches; gradients are in place
        optimizer.step()

    Every rank passes the whole chain and keeps its own stages; a chain on the meta device costs
    nothing. `full_state_dict()` has the values of all stages.

    Args:
        blocks: modules in order, each takes the output of the one before: a tensor, or tensors in a
            tuple (which are its arguments), list, dict or data class. Inputs of
            the first one may be integers, such as token ids; what a stage sends to the next has
            floating-point tensors of one dtype, and besides integers or masks. A parameter that blocks
            share has the sum of all its gradients on every rank that holds it.
        comm: communication with the other ranks; the pipeline axis and the data axes are used.
        loss: (output of the last block, targets) -> scalar mean over the micro-batch; or its sum and
            the number of targets, where micro-batches may have unequal numbers: the sums are then
            divided once, by the number of all.
        example: input of one micro-batch, for its shape and dtype only.
        microbatches: a step's input is split into so many, along dim 0.
        schedule: name or table file, as `weft schedule` draws it.
        chunks: of the model on each rank; by default as many as the schedule is made for.

    Raises:
        PlanError: the output of a stage is not floating point, or stages differ in the dtype of
            their outputs, or a stage begins with a change of its input in place, or the mesh has an
            axis along which replicas train apart, or the schedule does not take this number of
            micro-batches or chunks.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        comm: Comm,
        *,
        loss: LossOf,
        example: Tensor,
        microbatches: int,
        schedule: str = "1f1b",
        chunks: int | None = None,
    ) -> None:
        super().__init__()
        _check_one_replica(comm.mesh)
        if chunks is None:
            chunks = find(schedule).default_chunks
        for block in blocks:
            check_not_wrapped(block, WRAPPER_NAME)
            _check_no_shards(block)
        num_stages = comm.degree(PP) * chunks
        _check_enough_blocks(blocks, num_stages)
        faults = find(schedule).faults(
            ranks=comm.degree(PP), chunks=chunks, microbatches=microbatches
        )
        if faults:
            raise PlanError(*faults)
        outputs = _block_outputs(blocks, example)
        _check_first_blocks(outputs, num_stages)
        stages = _stages(outputs, num_stages=num_stages)
        dtype = _boundary_dtype(stages, outputs)
        plan = Plan(
            mesh=comm.mesh,
            family="custom",
            architecture="{}",
            stages=stages,
            schedule=schedule,
            schedule_lines=lines_of(schedule),
            chunks=chunks,
            microbatches=microbatches,
            params=dtype,
            compute=dtype,
            reduce=dtype,
        )
        modules = {str(index): block for index, block in enumerate(blocks)}
        if isinstance(loss, nn.Module):
            modules[LOSS] = loss
        # Of all blocks, before those of other ranks are dropped: `full_state_dict` broadcasts the same
        # tensors in the same order on every rank.
        self._state_entries = state_entries(modules)
        chain: dict[str, nn.Module] = {}
        packing: Packing | None = None
        last_of_stages = {int(stage.blocks[-1]) for stage in stages[:-1]}
        for index, block in enumerate(blocks):
            # What the block before has packed, this one unpacks. Only the last block of a stage packs:
            # within a stage tensors are handed on as they are.
            unpacking = packing
            packing = outputs[index].packing if index in last_of_stages else None
            chain[str(index)] = _UserBlock(block, unpacking=unpacking, packing=packing)
        chain[LOSS] = _LossBlock(loss)
        self.model: ParallelModel = parallelize(chain, plan, comm)
        self.stages = nn.ModuleList(self.model.stages.values())
        self.comm = comm
        self.microbatches = microbatches
        self._example_shape = tuple(example.shape)
        self._reducer = self._make_reducer()
        mark_wrapped(self.model.params.values(), self)
        self._start_alike()
        self._broadcast_buffers = BufferBroadcast()
        self._player = Player(self.model, before_last_backward=self._reduce_in_backward)
        self._is_in_step = False

    def _make_reducer(self) -> GradientReducer:
        """Buckets of the parameters that are trained now."""
        self._bucketed = self._trained_memory()
        return bucket_reducer(
            self.model.params,
            self.comm,
            reduce_axes={name: shard.reduce_axes for name, shard in self.model.shards.items()},
            stage_of=self.model.stage_of,
        )

    def _trained_memory(self) -> dict[str, torch.dtype]:
        """Name -> dtype of each trained parameter: where it changes, buckets are made anew."""
        return {name: each.dtype for name, each in self.model.params.items() if each.requires_grad}

    def _reduce_in_backward(self, stage: int) -> None:
        self._reducer.set_requires_gradient_sync(stage)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Rejected: neither a copy nor a file would have the communication.

        Raises:
            PlanError: by copy.deepcopy, copy.copy, pickle and torch.save.
        """
        reject_pickle(WRAPPER_NAME, "copied or pickled")

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss over `inputs` (of all data ranks), in place of those of the
        step before; returns that loss, on every rank. 0 where a loss with counts has no target.

        inputs[N, ...] and targets[N, ...] are this data rank's. Afterwards data ranks have the
        first one's buffers, such as the running statistics of BatchNorm.

        Raises:
            PlanError: N does not divide by `microbatches`, inputs and targets differ in it, or, with
                a pipeline, micro-batches have another shape than `example`; gradients are disabled; the
                step before raised an error, and there are several stages.
        """
        _check_gradients_enabled()
        self._drop_interrupted()
        if self._trained_memory() != self._bucketed:  # frozen, unfrozen or cast since the last step
            self._reducer.remove_hooks()
            for param in self.model.params.values():
                param.grad = None
            self._reducer = self._make_reducer()
        axes = data_axes(self.comm.mesh)
        num_parts = self.microbatches * self.comm.degree(axes)
        # As for means. Where losses are sums, `_divide_once` corrects this when all counts are known.
        seed = torch.full((), 1.0 / num_parts, dtype=torch.float64, device=self.comm.device)
        batches = self._micro_batches(inputs, targets)
        self._reducer.zero_grad()
        self._broadcast_buffers.before_forward(self.stages)
        self._is_in_step = True
        state = self._player.play(batches, seed)
        loss = state.loss * seed
        self._finish_gradients(axes)
        self._broadcast_buffers(self.stages, self.comm, axes)
        self._is_in_step = False
        return self._divide_once(loss, axes, num_parts=num_parts)

    def _drop_interrupted(self) -> None:
        """Begin anew where the last step has raised an error, as out of memory."""
        if not self._is_in_step:
            return
        if self.comm.degree(PP) > 1:
            # Messages of that step may still be under way: this step would receive them.
            fault = Fault(
                f"{WRAPPER_NAME}.step",
                "the last step raised an error, and what other stages have sent in it was not received",
                fix="start all ranks again",
            )
            raise PlanError(fault)
        self._is_in_step = False
        self._reducer.drop_interrupted()
        block = self.model.blocks[LOSS]
        if isinstance(block, _LossBlock):
            block.take_counts()

    def _divide_once(self, loss: Tensor, axes: tuple[str, ...], *, num_parts: int) -> Tensor:
        """The loss of all ranks. Where the loss counts its targets, it and the gradients, so far the
        sums over `num_parts`, are divided by the number of all targets instead.
        """
        counts: list[Tensor] = []
        block = self.model.blocks.get(LOSS)
        if isinstance(block, _LossBlock):
            counts = block.take_counts()
        # One all-reduce for all three. Only ranks of the last stage have numbers; the others add zeros.
        local = torch.zeros(3, dtype=loss.dtype, device=loss.device)
        local[0] = loss
        local[1] = sum(counts)
        local[2] = len(counts)
        total, count, num_counted = self.comm.all_reduce(local, (PP, *axes)).unbind()
        num_without = num_parts - int(num_counted.item())
        if num_without == num_parts:  # each has returned its mean
            return total
        if num_without:
            what = "returned a number of targets for some micro-batches alone"
            raise PlanError(Fault("loss", what, got=f"none for {num_without} of {num_parts}"))
        # The seed has divided by `num_parts` already.
        factor = num_parts / nonzero(count)
        self._reducer.scale(factor)
        return total * factor

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all stages is at most `max_norm`; returns the
        norm before, float64. A collective over all ranks.

        torch.nn.utils.clip_grad_norm_ would take the norm of this rank's stages: it is rejected.
        """
        aliases = {tie.name for tie in self.model.cross_stage_ties if not tie.is_owner}
        counted: list[tuple[Tensor, tuple[str, ...]]] = []
        gradients: list[Tensor] = []
        for name, param in self.model.params.items():
            if param.grad is None:
                continue
            gradients.append(param.grad)
            # Every copy of a tied parameter has the same sum: all are scaled, one counts in the norm.
            if name not in aliases:
                counted.append((param.grad, ()))
        norm = total_norm(self.comm, counted, over=PP)
        clip_to(gradients, norm, max_norm)
        return norm

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of `nn.Sequential(*blocks)`, on every rank; a collective over all ranks.

        A loss that is a module has its entries under `loss.`.
        """
        own = self.local_tensors()
        rank_of = self._ranks_of_blocks()
        state: dict[str, Tensor] = {}
        for entry in self._state_entries:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=self.comm.device)
            if entry.key in own:
                value.copy_(own[entry.key])
            state[entry.key] = self.comm.broadcast_(value, PP, root=rank_of[entry.block])
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the blocks of this rank from what `full_state_dict` returns, under any schedule and
        number of ranks.

        Raises:
            DataError: keys are missing or unknown, or a tensor has another shape.
        """
        check_state(state, {entry.key: entry.shape for entry in self._state_entries})
        for key, tensor in self.local_tensors().items():
            tensor.copy_(state[key])

    def local_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers of this rank's blocks, by key of `full_state_dict`."""
        found: dict[str, Tensor] = {}
        for name, block in self.model.blocks.items():
            module = block.loss if isinstance(block, _LossBlock) else block.module
            if isinstance(module, nn.Module):
                found.update(tensors_of(module, prefix=f"{name}."))
        return found

    def _ranks_of_blocks(self) -> dict[str, int]:
        """Pipeline rank of each block."""
        ranks: dict[str, int] = {}
        plan = self.model.plan
        for stage, rank in zip(plan.stages, plan.table.stage_to_rank, strict=True):
            ranks.update(dict.fromkeys(stage.blocks, rank))
        return ranks

    @torch.no_grad()
    def _start_alike(self) -> None:
        """Give replicas the values of the first of them: parameters and buffers of the data ranks,
        and layers that pipeline ranks share, from the rank of the first stage that has them.
        """
        comm = self.comm
        axes = data_axes(comm.mesh)
        for tensor in (*self.stages.parameters(), *self.stages.buffers()):
            if not tensor.is_meta:
                broadcast_first(tensor, comm, axes)
        for tie in self.model.cross_stage_ties:
            param = self.model.params[tie.name]
            if param.is_meta:
                continue
            own = param.detach().clone()
            received = torch.empty_like(own)
            # Both sides send and receive in one block, or two ranks would wait for each other; which of
            # them has the first stage is decided afterwards.
            with comm.grouped_messages():
                send = comm.start_send(own, PP, to=tie.peer)
                receiving = comm.start_recv(received, PP, source=tie.peer)
            received = receiving.wait()
            send.wait()
            if tie.peer < comm.index(PP):
                param.copy_(received)

    def _micro_batches(self, inputs: Tensor, targets: Tensor) -> list[Batch]:
        self._check_step_shapes(inputs, targets)
        no_positions = torch.zeros(0, dtype=torch.int64, device=inputs.device)
        input_parts = inputs.chunk(self.microbatches)
        target_parts = targets.chunk(self.microbatches)
        batches: list[Batch] = []
        for x, y in zip(input_parts, target_parts, strict=True):
            batches.append(Batch(x, y, no_positions))
        return batches

    def _check_step_shapes(self, inputs: Tensor, targets: Tensor) -> None:
        num_samples = len(inputs)
        if num_samples == 0 or num_samples % self.microbatches:
            raise PlanError(
                Fault(
                    "inputs",
                    "its samples do not divide into micro-batches of equal size",
                    got=f"{num_samples} samples",
                    need=f"a multiple of {self.microbatches}",
                    fix="drop the samples that are left over, or pass another number of microbatches",
                )
            )
        if len(targets) != num_samples:
            raise PlanError(
                Fault(
                    "targets",
                    "has another number of samples than the inputs",
                    got=str(len(targets)),
                    need=str(num_samples),
                    fix="pass one target for each input",
                )
            )
        shape = (num_samples // self.microbatches, *inputs.shape[1:])
        if self.comm.degree(PP) > 1 and shape != self._example_shape:
            raise PlanError(
                Fault(
                    "inputs",
                    "its micro-batches have another shape than the example",
                    got=str(list(shape)),
                    need=str(list(self._example_shape)),
                    fix="pass example=inputs[:N // microbatches], or another number of microbatches",
                )
            )

    def _finish_gradients(self, axes: tuple[str, ...]) -> None:
        """Wait for the sums over the data ranks and the copies of tied parameters; `.grad` is None
        where no rank used a parameter that is not tied.
        """
        reducer = self._reducer
        # First of all: on other ranks the backward may have started these reductions, and the
        # all-reduce of `used_on_any_rank` must have the same place behind them everywhere.
        reducer.start_remaining()
        # Before `finish`, which forgets which gradients have arrived.
        used = set(reducer.used_on_any_rank(axes))
        reducer.finish()
        sum_tied_gradients(self.model, reducer)
        is_sharded = self.comm.degree(PP) > 1
        # A stage that did not use its copy has the gradient of the one that did.
        used.update(tie.name for tie in self.model.cross_stage_ties)
        for group in reducer.groups:
            for name, param in group.params.items():
                param.grad = None
                if name in used:
                    # A gradient of some stages is marked as a part: torch.nn.utils.clip_grad_norm_
                    # would take their norm for that of all.
                    gradient = group.set_grad(name)
                    param.grad = part_of(gradient, None) if is_sharded else gradient


WRAPPER_NAME = "PipelineParallel"
LOSS = "loss"
"""Name of the block that is added after the user's."""


class _UserBlock(nn.Module):
    """A module of the user's with the signature of a block."""

    drops_out = False
    """By counter: in a plain script torch's generator decides."""

    def __init__(
        self, module: nn.Module, *, unpacking: Packing | None, packing: Packing | None
    ) -> None:
        super().__init__()
        self.module = module
        self.unpacking = unpacking
        self.packing = packing

    def forward(self, x: Any, batch: Batch) -> Any:
        if self.unpacking is not None:
            x = self.unpacking.unpack(x)
        out = call_block(self.module, x)
        return out if self.packing is None else self.packing.pack(out)


class _LossBlock(nn.Module):
    drops_out = False

    def __init__(self, loss: LossOf) -> None:
        super().__init__()
        self.loss = loss
        self._counts: list[Tensor] = []

    def forward(self, x: Any, batch: Batch) -> Tensor:
        found = self.loss(x, batch.targets)
        if isinstance(found, Tensor):
            return found
        total, count = found
        self._counts.append(torch.as_tensor(count).detach())
        return total

    def take_counts(self) -> list[Tensor]:
        """The numbers of targets that the loss has returned since the last call."""
        counts, self._counts = self._counts, []
        return counts


@dataclass(frozen=True)
class _Output:
    """Shape and dtype in which a stage sends a block's output.

    Attributes:
        writes_input: whether the block changes its input in place.
        packing: of several tensors; None of one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    writes_input: bool
    packing: Packing | None

    @property
    def dtype_name(self) -> str:
        """The name of the dtype as plans have it: "float32"."""
        return str(self.dtype).removeprefix("torch.")


def _check_one_replica(mesh: Mesh) -> None:
    """Raise PlanError for a mesh with replicas that train apart: nothing here joins them."""
    axis = local_update_axis(mesh)
    if axis is not None:
        what = f"replicas along {axis} train apart, and this module has no outer optimizer"
        raise PlanError(Fault("mesh", what, got=str(mesh), fix="`weft train`, which has one"))


def _check_gradients_enabled() -> None:
    if not torch.is_grad_enabled():
        raise PlanError(
            Fault(
                f"{WRAPPER_NAME}.step",
                "runs backwards, and gradients are disabled",
                fix="call it outside torch.no_grad() and torch.inference_mode()",
            )
        )


def _check_no_shards(block: nn.Module) -> None:
    for name, param in block.named_parameters():
        axes = shard_axes_of(param)
        if axes:
            raise PlanError(
                Fault(
                    f"blocks: {name}",
                    f"belongs to a layer that is sharded over {', '.join(axes)} already",
                    need="plain layers",
                    fix="weft.parallelize with axes, which shards plain layers over tp and pp",
                )
            )


def _check_enough_blocks(blocks: Sequence[nn.Module], num_stages: int) -> None:
    if len(blocks) < num_stages:
        raise PlanError(
            Fault(
                "blocks",
                "a stage would have none",
                got=str(len(blocks)),
                need=f"at least {num_stages}, one for each stage",
                fix="split modules into more blocks, or use fewer pipeline ranks or chunks",
            )
        )


def _block_outputs(blocks: Sequence[nn.Module], example: Tensor) -> list[_Output]:
    """What each block returns on the meta device."""
    keep_compiler_unimported()
    x: Any = torch.empty_like(example, device="meta")
    outputs: list[_Output] = []
    copies = copied_without_memory({str(index): block for index, block in enumerate(blocks)})
    for index, meta_block in enumerate(copies.values()):
        inputs = list(tensors_in(x))
        # A write in place counts the version up, also one through a view.
        versions = [tensor._version for tensor in inputs]
        with torch.device("meta"):  # also what the block makes without a device
            x = call_block(meta_block, x)
        writes_input = [tensor._version for tensor in inputs] != versions
        packing = packing_of(x, block=index)
        if packing is None:
            output = _Output(tuple(x.shape), x.dtype, writes_input, None)
        else:
            output = _Output((packing.length,), packing.dtype, writes_input, packing)
        outputs.append(output)
    return outputs


def _check_first_blocks(outputs: Sequence[_Output], num_stages: int) -> None:
    """Reject stages, besides the first, that begin with a change of their input in place: autograd
    needs it as it was received.
    """
    for stage in range(1, num_stages):
        first, _ = span(len(outputs), num_stages, stage)
        if outputs[first].writes_input:
            raise PlanError(
                Fault(
                    f"blocks[{first}]",
                    "begins a stage, and changes its input in place",
                    need="a block that leaves its input as it is",
                    fix="inplace=False, or join it with the block before it",
                )
            )


def _stages(outputs: Sequence[_Output], *, num_stages: int) -> tuple[Stage, ...]:
    """Stages of about equally many blocks; the last one has the loss."""
    num_blocks = len(outputs)
    stages: list[Stage] = []
    for index in range(num_stages):
        first, stop = span(num_blocks, num_stages, index)
        names = list(map(str, range(first, stop)))
        out: tuple[int, ...] = ()
        if stop == num_blocks:
            names.append(LOSS)
        else:
            out = outputs[stop - 1].shape
        stage = Stage(blocks=tuple(names), out=out, flops=float(stop - first))
        stages.append(stage)
    return tuple(stages)


def _boundary_dtype(stages: Sequence[Stage], outputs: Sequence[_Output]) -> str:
    """The dtype of what stages send to each other; of the last output where there is one stage."""
    last_blocks = [int(stage.blocks[-1]) for stage in stages[:-1]]
    if not last_blocks:
        last_blocks = [len(outputs) - 1]
    expected = outputs[last_blocks[0]]
    for block in last_blocks:
        output = outputs[block]
        if not output.dtype.is_floating_point:
            raise PlanError(
                Fault(
                    f"blocks[{block}]",
                    "ends a stage, and its output cannot carry a gradient",
                    got=output.dtype_name,
                    need="a floating-point dtype",
                    fix="join it with the block after it",
                )
            )
        if output.dtype != expected.dtype:
            raise PlanError(
                Fault(
                    f"blocks[{block}]",
                    "stages differ in the dtype of their outputs",
                    got=output.dtype_name,
                    need=expected.dtype_name,
                )
            )
    return expected.dtype_name
