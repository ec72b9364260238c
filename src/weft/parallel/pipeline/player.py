"""The pipeline player: executes one rank's row of a lowered schedule, whatever the schedule; one rank alone is a row too.

instruction     takes                                        leaves
F stage.mb      the input: batch, recvs or outputs           activations; its output in outputs
B stage.mb      activations; dy: recvs, outputs or the loss  parameter gradients; dx in outputs
I stage.mb      the same                                     pending_wgrads; dx in outputs
W stage.mb      pending_wgrads                               parameter gradients
send            outputs                                      sends
recv                                                         recvs
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.comm.transport import Work
from weft.models.common.batch import Batch, chain
from weft.parallel.autograd.split_backward import SplitBackward
from weft.parallel.model.fp8_pass import Fp8Pass
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.boundary import received_input, sent_output
from weft.parallel.pp import AXIS as PP
from weft.schedule.actions import Act, Table
from weft.schedule.lower import Send, Transfer, grouped_transfers, lower
from weft.schedule.simulate import ACTIVATION_CHANGE

ActionCallback = Callable[[Act], None]
"""Called with each action."""


class ActionRecorder(Protocol):
    """Sees when each action begins and ends, while a profile is recorded."""

    def begin_action(self, act: Act) -> None: ...
    def end_action(self) -> None: ...


MAX_SENDS = 8
"""Sends under way at once; before one more the oldest is waited for, which the order of a lowered
row allows at any time.
"""


@dataclass(frozen=True)
class PlayResult:
    """What a step yields besides the gradients, on this rank.

    Attributes:
        loss: sum of the losses of the micro-batches, float64 scalar: of the last stage, and extra
            losses of blocks.
        loads: block name -> tokens that the step sent to each of its experts, int64, for blocks
            that return a load.
        losses: the numbers that `loss` is the sum of.
    """

    loss: Tensor
    loads: dict[str, Tensor]
    losses: tuple[Tensor, ...]


class StageMicrobatch(NamedTuple):
    """A stage and a micro-batch, as a key."""

    stage: int
    microbatch: int


@dataclass(frozen=True)
class _Saved:
    """A forward whose backward has not run: its input, its output and extra loss, and the split of
    its backward.
    """

    input: Tensor
    outputs: tuple[Tensor, ...]
    split: SplitBackward | None


@dataclass(frozen=True)
class _SendUnderWay:
    """A send and the tensor that must stay allocated until it has ended."""

    work: Work
    tensor: Tensor


@dataclass
class StepState:
    """Tensors of one step between the instructions of a row.

    Attributes:
        seed: gradient of the step's loss by the summed loss, scalar.
        loss, loads, losses: as in `PlayResult`, so far.
        activations: forwards whose backward (B or I) has not run.
        pending_wgrads: weight gradients that an I has left for its W.
        outputs: outputs of actions, until they are sent or the next stage on this rank takes them.
        recvs: receives under way, by the action whose output they receive.
        sends: sends under way, oldest first.
    """

    batches: Sequence[Batch]
    seed: Tensor
    loss: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    activations: dict[StageMicrobatch, _Saved] = field(default_factory=dict)
    pending_wgrads: dict[StageMicrobatch, SplitBackward] = field(default_factory=dict)
    outputs: dict[Act, Tensor] = field(default_factory=dict)
    recvs: dict[Act, Work] = field(default_factory=dict)
    sends: deque[_SendUnderWay] = field(default_factory=deque)

    def take_output(self, act: Act) -> Tensor:
        """The output of `act`, which ran here or on another rank."""
        if act in self.recvs:
            return self.recvs.pop(act).wait()
        return self.outputs.pop(act)

    def check_empty(self) -> None:
        """Every tensor has been used."""
        left = (*self.activations, *self.pending_wgrads, *self.outputs, *self.recvs)
        assert not left, f"the schedule left {left[:3]} unused"


class Player:
    """Executes this rank's row of the plan's schedule.

    Args:
        model: this rank's stages.
        before_last_backward: called with a stage just before the backward that completes its
            gradients.
        on_action: called after every action.
        table: the schedule; default: the plan's.

    Attributes:
        action_recorder: sees when each action begins and ends; None: nothing is recorded.
        max_sends: sends under way at once; of more, the oldest is waited for.
    """

    def __init__(
        self,
        model: ParallelModel,
        *,
        before_last_backward: Callable[[int], None],
        on_action: ActionCallback | None = None,
        table: Table | None = None,
    ) -> None:
        self.model = model
        self.table = table or model.plan.table
        self.rank = model.comm.index(PP)
        self.before_last_backward = before_last_backward
        self.on_action = on_action
        self.action_recorder: ActionRecorder | None = None
        self.max_sends = MAX_SENDS
        self.last_backward: dict[int, Act] = {}
        for act in self.table.rows[self.rank]:
            # B, or the W of a split backward: these yield weight gradients, and the last one in the row
            # completes those of its stage.
            if ACTIVATION_CHANGE[act.kind] < 0:
                self.last_backward[act.stage] = act
        self._params: dict[int, tuple[nn.Parameter, ...]] = {}
        for stage, blocks in model.stages.items():
            self._params[stage] = tuple(blocks.parameters())

    @cached_property
    def parts(self) -> tuple[Act | tuple[Transfer, ...], ...]:
        """This rank's actions, and the transfers between them."""
        row = lower(self.table).rows[self.rank]
        return grouped_transfers(row)

    @cached_property
    def fp8_pass(self) -> Fp8Pass:
        """What this rank's linears in fp8 keep during a step."""
        return Fp8Pass.of(self.model, microbatches=self.table.microbatches)

    def play(
        self,
        batches: Sequence[Batch],
        seed: Tensor,
        *,
        before_action: Callable[[Act], None] | None = None,
    ) -> PlayResult:
        """One step: forwards and backwards of all micro-batches, gradients left in `.grad`.

        Args:
            batches: this rank's micro-batches, as many as the plan says.
            seed: gradient of the step's loss by the summed loss, scalar: 1 / global number of
                target tokens.
            before_action: called with every action before it runs.
        """
        no_loss = torch.zeros((), dtype=torch.float64, device=self.model.comm.device)
        state = StepState(batches, seed, loss=no_loss)
        with self.fp8_pass.open():
            for part in self.parts:
                if isinstance(part, Act):
                    if before_action is not None:
                        before_action(part)
                    self._execute(state, part)
                else:
                    self._start_transfers(state, part)
        # A sent tensor may be freed or written only when its send has ended.
        for send in state.sends:
            send.work.wait()
        state.check_empty()
        return PlayResult(state.loss, state.loads, tuple(state.losses))

    def _execute(self, state: StepState, act: Act) -> None:
        recorder = self.action_recorder
        if recorder is not None:
            recorder.begin_action(act)
        self._run_action(state, act)
        if recorder is not None:
            recorder.end_action()
        if self.on_action:
            self.on_action(act)

    def _start_transfers(self, state: StepState, transfers: Sequence[Transfer]) -> None:
        """Sends and receives between two actions: none of them waits for another."""
        # One group: NCCL deadlocks on a send and a receive in both directions that it gets one by
        # one.
        with self.model.comm.grouped_messages():
            for transfer in transfers:
                if isinstance(transfer, Send):
                    self._send(state, transfer)
                else:
                    self._recv(state, transfer)

    def _run_action(self, state: StepState, act: Act) -> None:
        match act.kind:
            case "F":
                self._forward(state, act)
            case "B" | "I":
                self._backward(state, act)
            case "W":
                self._backward_weights(state, act)

    def _forward(self, state: StepState, act: Act) -> None:
        key = StageMicrobatch(act.stage, act.mb)
        batch = state.batches[act.mb]
        source = self.table.source(act)
        if source is None:
            x = batch.inputs
        else:
            x = state.take_output(source)
            x.requires_grad_()  # a leaf: its gradient is what the stage before receives
        taken = x if source is None else received_input(self.model.plan, source.stage, x)
        split: SplitBackward | None = None
        if key in self.table.splits:
            split = SplitBackward(self._params[act.stage])
        blocks = self.model.stages[act.stage]
        with split or nullcontext(), self.model.buffer_records.of_microbatch(act.mb):
            out = chain(blocks, taken, batch)
            sent = sent_output(self.model.plan, act.stage, out.x)
        losses: list[Tensor] = []
        if out.loss is not None:
            losses.append(out.loss)
        state.activations[key] = _Saved(x, (sent, *losses), split)
        for name, load in out.loads.items():
            total = state.loads.get(name, 0)
            state.loads[name] = total + load
        last_stage = self.table.num_stages - 1
        if act.stage == last_stage:
            losses.insert(0, sent)
        else:
            # Without its graph, which `activations` keeps until the backward: a stage that takes the output on this rank
            # begins a graph of its own.
            state.outputs[act] = sent.detach()
        for loss in losses:
            value = loss.detach().double()
            state.loss += value
            state.losses.append(value)

    def _backward(self, state: StepState, act: Act) -> None:
        """B; or I, where the forward was split: then weight gradients stay pending."""
        self._notify_last_backward(act)
        key = StageMicrobatch(act.stage, act.mb)
        # Taken out before the backward, so that nothing but the graph holds the activations.
        saved = state.activations.pop(key)
        gradients: list[Tensor] = [state.seed.to(output.dtype) for output in saved.outputs]
        source = self.table.source(act)
        if source is not None:  # the output was no loss: its gradient comes from the next stage
            gradients[0] = state.take_output(source)
        # `saved` was taken out of the state, so what autograd frees during this backward is freed in memory, too.
        _backward_through(saved.outputs, gradients)
        if saved.split is not None:
            state.pending_wgrads[key] = saved.split
        if act.stage > 0:
            # Handed on without a copy: `saved` ends here, and nothing else has this tensor.
            input_grad = saved.input.grad
            assert input_grad is not None, f"{act}: no gradient reached the stage's input"
            state.outputs[act] = input_grad

    def _backward_weights(self, state: StepState, act: Act) -> None:
        self._notify_last_backward(act)
        key = StageMicrobatch(act.stage, act.mb)
        split = state.pending_wgrads.pop(key)
        split.backward_weights()

    def _notify_last_backward(self, act: Act) -> None:
        is_last = self.last_backward[act.stage] == act
        if is_last:
            self.before_last_backward(act.stage)

    def _send(self, state: StepState, send: Send) -> None:
        output = state.outputs.pop(send.act)
        # Kept until the send has ended: a backend reads its memory meanwhile.
        tensor = output.contiguous()
        work = self.model.comm.start_send(tensor, PP, to=send.peer)
        state.sends.append(_SendUnderWay(work, tensor))
        # Tensors under way take memory, and a stage that runs ahead would collect them.
        if len(state.sends) > self.max_sends:
            oldest = state.sends.popleft()
            oldest.work.wait()

    def _recv(self, state: StepState, recv: Transfer) -> None:
        plan = self.model.plan
        comm = self.model.comm
        boundary = recv.stage
        if recv.kind != "activation":
            boundary -= 1
        # It begins ahead of the action that reads it, beside what this rank computes in between.
        # New memory for each: an activation is the leaf of its stage's graph until the backward.
        buffer = torch.empty(
            plan.boundary_shape(boundary), dtype=getattr(torch, plan.compute), device=comm.device
        )
        work = comm.start_recv(buffer, PP, source=recv.peer)
        state.recvs[recv.act] = work


def _backward_through(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """torch.autograd.backward, without the outputs that need none.

    An extra loss may be a constant where its parameters are frozen; so is every output of a first
    stage that is frozen.
    """
    needed = []
    needed_gradients = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if output.requires_grad:
            needed.append(output)
            needed_gradients.append(gradient)
    torch.autograd.backward(needed, needed_gradients)
