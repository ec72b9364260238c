"""Owns the player: it obeys one row of a lowered schedule, whatever the schedule is; one rank alone is just another row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.transport import Work
from weft.models.common.batch import Batch, chain
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.split_backward import SplitBackward
from weft.schedule.actions import Act, Kind, Table
from weft.schedule.lower import Recv, Send, lower
from weft.schedule.simulate import ACTIVATION_CHANGE

ActionCallback = Callable[[Act, float, float], None]
"""Called with each action and its start and end, seconds of `time.perf_counter`."""


MOST_LEAVING = 8
"""Sends under way at once; before one more the oldest is waited for. The program's order allows to wait for any send."""


@dataclass(frozen=True)
class PlayResult:
    """What a step yields besides the gradients, on this rank.

    Attributes:
        loss: sum of the losses of the micro-batches, float64 scalar: of the last stage, and extra losses of blocks.
        loads: block name -> tokens that the step sent to each of its experts, int64, for blocks that tell.
    """

    loss: Tensor
    loads: dict[str, Tensor]


@dataclass(frozen=True)
class _Kept:
    """A forward that waits for its backward: what went in, what came out (x and perhaps an extra loss), how it is split."""

    x: Tensor
    outputs: tuple[Tensor, ...]
    split: SplitBackward | None


@dataclass
class Play:
    """What is on the table during one step.

    Attributes:
        kept: (stage, micro-batch) -> the forward, until its backward (B or I).
        owed: (stage, micro-batch) -> the weight gradients that I left, until W.
        made: tensors that wait to be sent, or to be taken by the next stage on the same rank.
        posted: receives under way, by the action that makes the tensor.
        leaving: sends under way, with what they hold alive.
        loss, loads: as in `PlayResult`, so far.
    """

    batches: Sequence[Batch]
    seed: Tensor
    loss: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    owed: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    made: dict[Act, Tensor] = field(default_factory=dict)
    posted: dict[Act, Work] = field(default_factory=dict)
    leaving: deque[tuple[Work, Tensor]] = field(default_factory=deque)


class Player:
    """Plays this rank's row of the plan's schedule.

    Args:
        model: this rank's stages.
        before_last_backward: called with a stage just before the backward that completes its gradients.
        on_action: told of every action, for profiles.
        table: what is played; by default the plan's.
    """

    def __init__(
        self,
        model: ParallelModel,
        *,
        before_last_backward: Callable[[int], None],
        on_action: ActionCallback | None = None,
        table: Table | None = None,
    ) -> None:
        self.model, self.on_action = model, on_action
        self.table = table or model.plan.table
        self.row = lower(self.table).rows[model.comm.index("pp")]
        self.before_last_backward = before_last_backward
        acts = [instruction for instruction in self.row if isinstance(instruction, Act)]
        self.last_backward = {act.stage: act for act in acts if ACTIVATION_CHANGE[act.kind] < 0}
        self._params = {stage: tuple(blocks.parameters()) for stage, blocks in model.stages.items()}

    def play(self, batches: Sequence[Batch], seed: Tensor) -> PlayResult:
        """One step: forwards and backwards of all micro-batches, gradients left in `.grad`.

        Args:
            batches: this rank's micro-batches, as many as the plan says.
            seed: gradient of the step's loss by the summed loss, scalar: 1 / global number of target tokens.
        """
        play = Play(batches, seed, loss=torch.zeros((), dtype=torch.float64, device=self.model.comm.device))
        act: dict[Kind, Callable[[Play, Act], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._backward_weights
        }  # fmt: skip
        for instruction in self.row:
            if isinstance(instruction, Send):
                self._send(play, instruction)
            elif isinstance(instruction, Recv):
                self._post(play, instruction)
            else:
                start = time.perf_counter()
                act[instruction.kind](play, instruction)
                if self.on_action:
                    self.on_action(instruction, start, time.perf_counter())
        for work, _ in play.leaving:
            work.wait()
        left = (*play.kept, *play.owed, *play.made, *play.posted)
        assert not left, f"the table left {left[:3]} behind"
        return PlayResult(play.loss, play.loads)

    def _forward(self, play: Play, act: Act) -> None:
        batch, blocks = play.batches[act.mb], self.model.stages[act.stage]
        source = self.table.source(act)
        x = batch.inputs if source is None else self._take(play, source).requires_grad_()
        split = SplitBackward(self._params[act.stage]) if (act.stage, act.mb) in self.table.splits else None
        with split or nullcontext():
            out = chain(blocks, x, batch)
        outputs = (out.x,) if out.loss is None else (out.x, out.loss)
        play.kept[act.stage, act.mb] = _Kept(x, outputs, split)
        for name, load in out.loads.items():
            play.loads[name] = play.loads.get(name, 0) + load
        is_last = act.stage == self.table.num_stages - 1
        for loss in outputs if is_last else outputs[1:]:
            play.loss += loss.detach().double()
        if not is_last:
            play.made[act] = out.x.detach()

    def _backward(self, play: Play, act: Act) -> None:
        """B, or I where the forward was split: then weight gradients stay owed."""
        self._announce(act)
        kept = play.kept.pop((act.stage, act.mb))
        source = self.table.source(act)
        seeds = [play.seed.to(output.dtype) for output in kept.outputs]
        seeds = seeds if source is None else [self._take(play, source), *seeds[1:]]
        torch.autograd.backward(*_that_flow(kept.outputs, seeds))
        if kept.split is not None:
            play.owed[act.stage, act.mb] = kept.split
        if act.stage > 0:
            assert kept.x.grad is not None, f"{act}: nothing flowed back to the stage's input"
            play.made[act] = kept.x.grad

    def _backward_weights(self, play: Play, act: Act) -> None:
        self._announce(act)
        play.owed.pop((act.stage, act.mb)).backward_weights()

    def _announce(self, act: Act) -> None:
        if self.last_backward[act.stage] == act:
            self.before_last_backward(act.stage)

    def _take(self, play: Play, source: Act) -> Tensor:
        """The tensor that `source` made, here or on another rank."""
        return play.posted.pop(source).wait() if source in play.posted else play.made.pop(source)

    def _send(self, play: Play, send: Send) -> None:
        tensor = play.made.pop(send.act).contiguous()
        play.leaving.append((self.model.comm.start_send(tensor, "pp", to=send.peer), tensor))
        if len(play.leaving) > MOST_LEAVING:
            play.leaving.popleft()[0].wait()

    def _post(self, play: Play, recv: Recv) -> None:
        comm, boundary = self.model.comm, recv.stage if recv.kind == "activation" else recv.stage - 1
        dtype = getattr(torch, self.model.plan.compute)
        buffer = torch.empty(self.model.plan.boundary_shape(boundary), dtype=dtype, device=comm.device)
        play.posted[recv.act] = comm.start_recv(buffer, "pp", source=recv.peer)


def _that_flow(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Without those that nothing flows back from: an extra loss may be a constant where its parameters are frozen, and so is
    all that comes out of a first stage which is frozen whole."""
    flowing = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    return [output for output, _ in flowing], [gradient for _, gradient in flowing]
