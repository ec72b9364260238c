"""Training loop over transformers' model, one step after the other by definition; every tensor recorded under weft's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.models.common.batch import IGNORE, Batch
from weft.prove.against.float64 import noise
from weft.prove.against.hf_model import HFModel
from weft.prove.against.hf_pass import HFPass
from weft.prove.against.hf_weights import HFWeights
from weft.prove.against.routers import moved_bias
from weft.prove.against.torch_optimizer import WholeOptimizer, whole_optimizer
from weft.prove.plain_optimizers import plain_learning_rate
from weft.prove.raw_batch import batch_of, evaluated_samples, samples_of_step
from weft.prove.reference_trace import ReferenceTrace
from weft.prove.subject import Task

CLIP_EPS = 1e-6
"""Added to the norm by which gradients are clipped, as in `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True)
class Noise:
    """Rounding errors that are added: of one unit `eps` at the outputs of modules."""

    modules: tuple[torch.nn.Module, ...]
    eps: float
    seed: int


@dataclass
class HFReference:
    """The training of a run by transformers.

    Args:
        blocks: names of weft's blocks, in order.

    Attributes:
        params: whole parameters by weft's names.
        trained: those that the optimizer updates.
    """

    task: Task
    hf: HFModel
    weights: HFWeights
    blocks: tuple[str, ...]
    trace: ReferenceTrace = field(init=False)
    params: dict[str, Tensor] = field(init=False)
    trained: dict[str, Tensor] = field(init=False)
    optimizer: WholeOptimizer = field(init=False)
    optimizer_text: str = field(init=False)

    def __post_init__(self) -> None:
        task = self.task
        self.trace = ReferenceTrace(self.blocks)
        self.params = self.weights.read(self.hf.published)
        self.trained = self.weights.read(self.hf.trained)
        self.params.update(self.trained)
        axes = task.family.axes(task.model)
        self.optimizer, self.optimizer_text = whole_optimizer(self.trained, task.optim, axes)
        self.forward = HFPass(self.hf, task.model.architecture, task.batch.micro_size)

    def run(self, num_steps: int, added: Noise | None = None) -> ReferenceTrace:
        """Train all steps, then evaluate."""
        with ExitStack() as stack:
            if added is not None:
                stack.enter_context(noise(added.modules, eps=added.eps, seed=added.seed))
            for step in range(1, num_steps + 1):
                self._step(step)
            self._evaluate(num_steps)
        return self.trace

    def _step(self, step: int) -> None:
        task = self.task
        numbers = samples_of_step(
            task.samples, step - 1, global_size=task.batch.global_size, seed=task.seed
        )
        batch = batch_of(task.samples, numbers, later=task.model.reads_later_targets)
        num_targets = max(_num_targets(batch), 1)
        self._keep_inputs(step, batch, num_targets)
        published = self.forward.run(batch, num_targets)
        self.forward.keep_in(self.trace, step)
        self.trace.keep_number(step, "loss", "loss", self.forward.loss / num_targets)
        lr = plain_learning_rate(step - 1, task.optim, task.steps)
        self.trace.lrs[step] = lr
        self.trace.keep_number(step, "update", "learning rate", lr)
        self._update(step, self.weights.read(published), lr=lr)
        self._keep_state(step)

    def _keep_inputs(self, step: int, batch: Batch, num_targets: int) -> None:
        """Keep the batch of a step, and the parameters as the model holds them."""
        for name, tensor in batch.tensors().items():
            self.trace.keep(step, "batch", name, tensor)
        for name, value in self.weights.read(self.hf.published).items():
            self.trace.keep(step, "forward", f"{name} as used", value)
        self.trace.keep_number(step, "batch", "number of targets", num_targets)

    def _update(self, step: int, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Norm, clip factor and optimizer by definition; the new values go to the model."""
        squares = [float(gradient.square().sum()) for gradient in gradients.values()]
        norm = math.sqrt(sum(squares))
        factor = 1.0
        most = self.task.clip_of(step)
        if most > 0:
            factor = min(1.0, most / (norm + CLIP_EPS))
        self.trace.keep_number(step, "norm", "gradient norm", norm)
        self.trace.keep_number(step, "clip", "clip factor", factor)
        clipped = {}
        for name, gradient in gradients.items():
            clipped[name] = gradient * factor
            self.trace.keep(step, "backward", f"{name} gradient", gradient)
            self.trace.keep(step, "reduce", f"{name} gradient", gradient)
            self.trace.keep(step, "clip", f"{name} clipped gradient", clipped[name])
        with torch.no_grad():
            self.optimizer.step(clipped, lr)
            self._move_biases()
            self.weights.write(self.params, self.hf.published)

    def _move_biases(self) -> None:
        """The balancing biases, which are parameters of weft and buffers of transformers."""
        rate = self.task.model.architecture.get("balance_rate", 0.0)
        for block, load in self.forward.loads.items():
            for name in self.params.keys() - self.trained.keys():
                if name.startswith(f"{block}."):
                    self.params[name] = moved_bias(self.params[name], load, rate=rate)

    def _keep_state(self, step: int) -> None:
        for name, value in self.params.items():
            self.trace.keep(step, "update", name, value)
        for name, state in self.optimizer.state.items():
            for key, tensor in state.items():
                self.trace.keep(step, "moments", f"{name} {key}", tensor)

    def _evaluate(self, step: int) -> None:
        """The mean loss of some samples after the last step."""
        task = self.task
        loss = 0.0
        num_targets = 0
        for numbers in evaluated_samples(task.samples, task.batch.global_size):
            batch = batch_of(task.samples, numbers, later=False)
            loss += self.forward.loss_of(batch)
            num_targets += _num_targets(batch)
        self.trace.keep_number(step, "evaluation", "evaluation loss", loss / max(num_targets, 1))
        self.trace.keep_number(step, "evaluation", "number of targets", num_targets)


def _num_targets(batch: Batch) -> int:
    return int((batch.targets != IGNORE).sum())
