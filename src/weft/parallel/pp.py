"""Owns the player: it obeys one row of a lowered schedule, whatever the schedule is; one rank alone is just another row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.transport import Work
from weft.core.lower import Instruction, Recv, Send, lower
from weft.core.schedule import Act
from weft.models.batch import Batch
from weft.parallel.model import ParallelModel

Watch = Callable[[Act, float, float], None]
"""Called with each action and its start and end, seconds of `time.perf_counter`."""


MOST_LEAVING = 8
"""Sends under way at once; before one more the oldest is waited for. The program's order allows to wait for any send."""


@dataclass
class _Play:
    """What is on the table during one step.

    Attributes:
        kept: (stage, micro-batch) -> input and output of the forward, until its backward.
        made: tensors that wait to be sent, or to be taken by the next stage on the same rank.
        posted: receives under way, by the action that makes the tensor.
        leaving: sends under way, with what they hold alive.
        loss: sum of the losses of the micro-batches, float64; stays 0 off the last stage.
    """

    batches: Sequence[Batch]
    seed: Tensor
    loss: Tensor
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    made: dict[Act, Tensor] = field(default_factory=dict)
    posted: dict[Act, Work] = field(default_factory=dict)
    leaving: deque[tuple[Work, Tensor]] = field(default_factory=deque)


class Player:
    """Plays this rank's row of the plan's schedule.

    Args:
        model: this rank's stages.
        before_last_backward: called with a stage just before the backward that completes its gradients.
        watch: told of every action, for profiles.
    """

    def __init__(
        self, model: ParallelModel, *, before_last_backward: Callable[[int], None], watch: Watch | None = None
    ) -> None:
        self.model, self.watch = model, watch
        self.table = model.plan.table
        self.row = lower(self.table).rows[model.comm.index("pp")]
        self.before_last_backward = before_last_backward
        self.last_backward = {instruction.stage: instruction for instruction in self.row if _is_backward(instruction)}

    def play(self, batches: Sequence[Batch], seed: Tensor) -> Tensor:
        """One step: forwards and backwards of all micro-batches, gradients left in `.grad`.

        Args:
            batches: this rank's micro-batches, as many as the plan says.
            seed: gradient of the step's loss by the summed loss, scalar: 1 / global number of target tokens.

        Returns:
            Sum of the losses of this rank's micro-batches, float64 scalar; 0 off the last stage.
        """
        play = _Play(batches, seed, loss=torch.zeros((), dtype=torch.float64, device=self.model.comm.device))
        for instruction in self.row:
            if isinstance(instruction, Send):
                self._send(play, instruction)
            elif isinstance(instruction, Recv):
                self._post(play, instruction)
            else:
                start = time.perf_counter()
                self._forward(play, instruction) if instruction.kind == "F" else self._backward(play, instruction)
                if self.watch:
                    self.watch(instruction, start, time.perf_counter())
        for work, _ in play.leaving:
            work.wait()
        left = (*play.kept, *play.made, *play.posted)
        assert not left, f"the table left {left[:3]} behind"
        return play.loss

    def _forward(self, play: _Play, act: Act) -> None:
        batch = play.batches[act.mb]
        source = self.table.source(act)
        x = batch.inputs if source is None else self._take(play, source).requires_grad_()
        y = x
        for block in self.model.stages[act.stage].values():
            y = block(y, batch)
        play.kept[act.stage, act.mb] = x, y
        if act.stage == self.table.num_stages - 1:
            play.loss += y.detach().double()
        else:
            play.made[act] = y.detach()

    def _backward(self, play: _Play, act: Act) -> None:
        if self.last_backward[act.stage] == act:
            self.before_last_backward(act.stage)
        x, y = play.kept.pop((act.stage, act.mb))
        source = self.table.source(act)
        torch.autograd.backward(y, play.seed.to(y.dtype) if source is None else self._take(play, source))
        if act.stage > 0:
            assert x.grad is not None, f"{act}: nothing flowed back to the stage's input"
            play.made[act] = x.grad

    def _take(self, play: _Play, source: Act) -> Tensor:
        """The tensor that `source` made, here or on another rank."""
        return play.posted.pop(source).wait() if source in play.posted else play.made.pop(source)

    def _send(self, play: _Play, send: Send) -> None:
        tensor = play.made.pop(send.act).contiguous()
        play.leaving.append((self.model.comm.start_send(tensor, "pp", to=send.peer), tensor))
        if len(play.leaving) > MOST_LEAVING:
            play.leaving.popleft()[0].wait()

    def _post(self, play: _Play, recv: Recv) -> None:
        comm, boundary = self.model.comm, recv.stage if recv.kind == "activation" else recv.stage - 1
        dtype = getattr(torch, self.model.plan.compute)
        buffer = torch.empty(self.model.plan.boundary_shape(boundary), dtype=dtype, device=comm.device)
        play.posted[recv.act] = comm.start_recv(buffer, "pp", source=recv.peer)


def _is_backward(instruction: Instruction) -> bool:
    return isinstance(instruction, Act) and instruction.kind in ("B", "W")
