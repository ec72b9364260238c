"""One-device reference of a run: plain modules, autograd and a plain optimizer on whole batches, every tensor recorded.

Uses none of the parallel code, nor the code that feeds ranks, reduces, clips or updates. It runs in
any number types, and perturbed: see `Perturbation` and weft/prove/bounds.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.data.order import Ints
from weft.models import Family
from weft.models.common.batch import IGNORE, Batch, activation_of
from weft.models.common.dropout_mode import run_block
from weft.models.common.head_output import use_plain_losses
from weft.models.common.init import init_params, named_parameters, tie
from weft.models.common.moe import MoE, Router
from weft.prove.arithmetic import PLAIN, Perturbation
from weft.prove.looked_up_rows import free_rows
from weft.prove.plain_buffers import PlainBuffers
from weft.prove.plain_fp8 import use_plain_fp8
from weft.prove.plain_nf4 import quantized_plainly
from weft.prove.plain_optimizers import PlainOptimizer, plain_learning_rate
from weft.prove.plain_preferences import (
    LOSS,
    REWARD,
    PlainPreferenceLoss,
    PlainRewardLoss,
    ReferenceModel,
)
from weft.prove.raw_batch import batch_of, evaluated_samples, samples_of_step, with_draw_keys
from weft.prove.record import rated_steps
from weft.prove.reference_pass import ReferencePass
from weft.prove.reference_trace import ReferenceTrace, TensorKey
from weft.prove.subject import Task

FIRST_SCALE = 65536.0
"""Loss scale of float16 before the first step, in the definition of the run."""
OVERFLOW_MARGIN = 8.0
"""Gradients overflow in float16 on one layout and not on another where partial sums of fewer tokens
are held in it; so within this factor of the loss scale either is right."""


@dataclass(frozen=True)
class StepGradients:
    """Gradients of a step, times the loss scale.

    Attributes:
        norm: of all of them, without the loss scale.
        overflows: whether that is not finite in float16.
    """

    forward: ReferencePass
    gradients: Mapping[str, Tensor]
    scale: float
    norm: float
    overflows: bool


class Reference:
    """The training of a run on one device.

    Args:
        perturbation: see there.
        records: whether tensors are kept; else only the numbers of steps.
        skipped: steps whose float16 gradients overflowed on the layout; None: it does not matter.
    """

    def __init__(
        self,
        task: Task,
        *,
        perturbation: Perturbation = PLAIN,
        records: bool = True,
        skipped: frozenset[int] | None = None,
    ) -> None:
        self.task = task
        self.skipped = skipped
        self.perturbation = perturbation
        self.types = task.types
        self.is_scaled = self.types.compute == torch.float16
        self.scale = FIRST_SCALE if self.is_scaled else 1.0
        noise_seed = perturbation.noise_seed or 0
        self._generator = torch.Generator().manual_seed(noise_seed)
        # blocks, their parameters, and the optimizer
        family = task.family
        ties = family.ties(task.model)
        self.blocks = dict(family.blocks(task.model))
        if task.has_token_losses:
            use_plain_losses(self.blocks)
        use_plain_fp8(self.blocks)
        # Before parameters are named and filled: a tied one is one tensor then, and autograd
        # adds up what its uses give.
        tie(self.blocks, ties)
        self.buffers = PlainBuffers(
            self.blocks, compute=self.types.compute, dtype=self.types.params
        )
        if perturbation.is_inside_blocks:
            self._perturb_modules()
        self.params = _owned_parameters(self.blocks, ties)
        self.values = self._initial_values(family, task.source)
        self.trained = self._fill_parameters()
        self.reference_model: ReferenceModel | None = None
        if task.dpo is not None:
            self.blocks[LOSS] = PlainPreferenceLoss(task.dpo, perturbed=self.perturbed)
            if task.dpo.has_reference:
                # Copied here, while the blocks have their initial values.
                self.reference_model = ReferenceModel(
                    self.blocks, stored=None, perturbed=self.perturbed
                )
        elif task.loss == REWARD:
            self.blocks[LOSS] = PlainRewardLoss()
        axes = family.axes(task.model)
        self.optimizer = PlainOptimizer(self.trained, task.optim, axes)
        self.trace = ReferenceTrace(tuple(self.blocks), keeps_tensors=records)

    def _fill_parameters(self) -> dict[str, Tensor]:
        """Give the modules their initial values; those that are trained, in the dtype of parameters."""
        trained = {}
        for name, param in self.params.items():
            # Blocks compute with a copy in the type of computation; the optimizer updates the value in
            # the type of parameters, so that no small update is lost in rounding.
            value = self.values[name]
            param.data = value.to(self._module_dtype(name))
            if param.requires_grad:
                trained[name] = value
        return trained

    def _perturb_modules(self) -> None:
        """Add noise to the outputs of all modules that consist of no others."""

        def perturb(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, Tensor) and output.dim() > 0:
                return self.perturbed(output)
            return output

        seen: set[int] = set()
        for block in self.blocks.values():
            for module in block.modules():
                has_children = any(True for _ in module.children())
                if has_children or id(module) in seen:
                    continue
                seen.add(id(module))
                module.register_forward_hook(perturb)

    def _initial_values(self, family: Family, source: Source | None) -> dict[str, Tensor]:
        """Initial values in the dtype of parameters: stored ones, else drawn."""
        stored = source.shapes if source is not None else {}
        values: dict[str, Tensor] = {}
        drawn: dict[str, Tensor] = {}
        for name, param in self.params.items():
            if source is not None and name in stored:
                everything = Box.whole(tuple(param.shape))
                values[name] = source.read(name, everything).to(self.types.params)
            else:
                values[name] = torch.empty(param.shape, dtype=self.types.params)
                drawn[name] = values[name]
        model = self.task.model
        init_params(drawn, family.init(model), seed=self.task.seed)
        quantize = self.task.quantize
        return {
            name: quantized_plainly(name, value, family, model, quantize=quantize)
            for name, value in values.items()
        }

    def _module_dtype(self, name: str) -> torch.dtype:
        """Biases of routers stay in the dtype of parameters, all others are cast."""
        param = self.params[name]
        for router in self._routers.values():
            if router.bias is param:
                return self.types.params
        return self.types.compute

    @property
    def _routers(self) -> dict[str, Router]:
        found = {}
        for name, block in self.blocks.items():
            for module in block.modules():
                if isinstance(module, MoE):
                    found[name] = module.router
        return found

    @property
    def has_zero_matrices(self) -> bool:
        """Whether a trained matrix is zero now; before the first step, whether one starts at zero."""
        matrices = [value for value in self.trained.values() if value.dim() > 1]
        return any(not bool(matrix.any()) for matrix in matrices)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Train; yields the number of each step once it is done."""
        for step in range(1, num_steps + 1):
            self._step(step)
            yield step

    def run_all(self, num_steps: int) -> ReferenceTrace:
        """Train all steps."""
        for _ in self.steps(num_steps):
            pass
        self._evaluate(num_steps)
        self._keep_rates()
        return self.trace

    def _keep_rates(self) -> None:
        """The learning rates of the whole schedule, of which few steps are trained."""
        total = self.task.steps
        for step in rated_steps(total):
            rate = plain_learning_rate(step - 1, self.task.optim, total)
            self.trace.keep_number(step, "update", "learning rate", rate)

    def _evaluate(self, step: int) -> None:
        """The mean loss of some samples after the last step."""
        loss = 0.0
        num_targets = 0
        task = self.task
        for numbers in evaluated_samples(task.samples, task.batch.global_size):
            batch = self.batch_of(numbers)
            num_targets += _num_targets(batch)
            self._estimate_z0(batch)
            loss += sum(self._losses_alone(batch))
        mean = loss / max(num_targets, 1)
        self.trace.keep_number(step, "evaluation", "evaluation loss", mean)
        self.trace.keep_number(step, "evaluation", "number of targets", num_targets)

    @torch.no_grad()
    def _losses_alone(self, batch: Batch) -> list[float]:
        """The sums over targets of the last block's loss in each micro-batch, evaluated."""
        losses = []
        with self.buffers.evaluating():
            for rows in self.micro_batches(len(batch.inputs)):
                part = batch.rows(slice(rows.start, rows.stop))
                x: Any = part.inputs
                for name, block in self.blocks.items():
                    x = activation_of(run_block(name, block, x, part))
                    if isinstance(x, Tensor) and x.dim():
                        x = self.perturbed(x)
                losses.append(float(x.double()))
        return losses

    def _estimate_z0(self, batch: Batch) -> None:
        """Set z0 of KTO to that of a whole batch: the mean of what its second documents have gained
        over the reference model, nothing being dropped.
        """
        loss = self.blocks[LOSS]
        if not isinstance(loss, PlainPreferenceLoss) or not loss.dpo.has_labels:
            return
        loss.z0 = None
        total = sum(self._losses_alone(replace(batch, draw_keys=None)))
        loss.z0 = max(total / max(_num_targets(batch), 1), 0.0)

    def free_outputs(
        self, num_steps: int, free_updates: Callable[[str, int], Tensor | None]
    ) -> dict[TensorKey, Tensor]:
        """How far rounding of the gradients of the steps before may move each entry of the output of
        the first block; see Note [Bounds of looked-up rows].

        Args:
            free_updates: parameter and step -> how far the step may move its entries.
        """
        found = {}
        name, block = next(iter(self.blocks.items()))
        owners = {id(param): owner for owner, param in self.params.items()}
        paths = {path: owners[id(param)] for path, param in block.named_parameters()}
        for step in range(2, num_steps + 1):
            values, free = {}, {}
            for path, owner in paths.items():
                values[path] = self.trace.values[TensorKey.as_used(step, owner)]
                moves = free_updates(owner, step - 1)
                if moves is not None:
                    free[path] = moves
            batch = self.batch_of_step(step)
            rows = free_rows(name, block, values=values, free=free, batch=batch)
            if rows is not None:
                found[TensorKey(step, "forward", f"{name}.output")] = rows
        return found

    def batch_of_step(self, step: int) -> Batch:
        """The whole batch of step `step` (the first is 1)."""
        task = self.task
        numbers = samples_of_step(
            task.samples, step - 1, global_size=task.batch.global_size, seed=task.seed
        )
        first = (step - 1) * task.batch.global_size
        places = range(first, first + task.batch.global_size)
        return with_draw_keys(self.batch_of(numbers), places, seed=task.seed)

    def batch_of(self, numbers: Ints) -> Batch:
        """The batch of these samples; pairs have log-probabilities under the reference model."""
        task = self.task
        batch = batch_of(task.samples, numbers, later=task.model.reads_later_targets)
        if self.reference_model is None:
            return batch
        parts = self.micro_batches(len(numbers))
        return self.reference_model.add_to(batch, numbers, parts=parts)

    def _step(self, step: int) -> None:
        batch = self.batch_of_step(step)
        num_targets = max(_num_targets(batch), 1)
        self._estimate_z0(batch)
        self._keep_inputs(step, batch, num_targets)
        computed = self._gradients_as_on_layout(step, batch, num_targets)
        self._keep_gradients(step, computed, num_targets)
        lr = plain_learning_rate(step - 1, self.task.optim, self.task.steps)
        self.trace.lrs[step] = lr
        self.trace.keep_number(step, "update", "learning rate", lr)
        if computed.overflows:
            self.trace.skipped.add(step)
            self.scale = computed.scale / 2
            # Its micro-batches have moved the statistics already.
            self.buffers.undo()
        else:
            self.scale = computed.scale
            self.buffers.finish_step()
            self._update(step, computed, lr=lr)
            self._rebalance(computed.forward.loads)
        self._keep_state(step)

    def _gradients_as_on_layout(self, step: int, batch: Batch, num_targets: int) -> StepGradients:
        """The gradients of a step; in a borderline case of float16 with the loss scale at which they
        overflow, or not, as on the layout.
        """
        computed = self._gradients(batch, num_targets, self.scale)
        if not self._overflows_elsewhere(step, computed):
            return computed
        margin = 1 / OVERFLOW_MARGIN if computed.overflows else OVERFLOW_MARGIN
        other = self._gradients(batch, num_targets, self.scale * margin)
        return computed if other.overflows == computed.overflows else other

    def _keep_inputs(self, step: int, batch: Batch, num_targets: int) -> None:
        """Keep the batch of a step, and the parameters as its forward uses them."""
        for name, tensor in batch.tensors().items():
            self.trace.keep(step, "batch", name, tensor)
        if batch.documents is not None:
            self.trace.keep(step, "batch", "whole_documents", batch.documents)
        for name, param in self.params.items():
            self.trace.keep(step, "forward", f"{name} as used", param)
        self.trace.keep_number(step, "batch", "number of targets", num_targets)

    def _gradients(self, batch: Batch, num_targets: int, scale: float) -> StepGradients:
        """Forward and backward of a batch with a loss scale."""
        # The gradients of a borderline step are computed twice, and its statistics must move once.
        self.buffers.undo()
        trained = {name: self.params[name] for name in self.trained}
        forward = ReferencePass(
            self.blocks,
            trained,
            batch,
            loss_scale=scale,
            num_targets=num_targets,
            perturbed=self.perturbed,
            keeps_tensors=self.trace.keeps_tensors,
        )
        micro_batches = self.micro_batches(len(batch.inputs))
        sums = forward.run(micro_batches, reduce=self.types.reduce)
        gradients: dict[str, Tensor] = {}
        squares: list[float] = []
        for name, total in sums.items():
            # Rounded before the norm is computed, as ranks round the reduced sum to the type of the parameter.
            gradient = total.to(self.types.params)
            gradients[name] = gradient
            squares.append(float(gradient.double().square().sum()))
        norm = math.sqrt(sum(squares)) / scale
        return StepGradients(
            forward, gradients, scale, norm, overflows=self.is_scaled and not math.isfinite(norm)
        )

    def _overflows_elsewhere(self, step: int, computed: StepGradients) -> bool:
        """Whether the gradients of the step overflow here or on the layout, but not on both."""
        if self.skipped is None or not self.is_scaled:
            return False
        return computed.overflows != (step in self.skipped)

    def _keep_gradients(self, step: int, computed: StepGradients, num_targets: int) -> None:
        forward = computed.forward
        forward.keep_in(self.trace, step)
        self.trace.keep_number(step, "loss", "loss", forward.loss / num_targets)
        self.trace.keep_number(step, "norm", "gradient norm", computed.norm)
        for name, gradient in computed.gradients.items():
            title = f"{name} gradient"
            unscaled = gradient.double() / computed.scale
            self.trace.keep(step, "backward", title, unscaled)
            self.trace.keep(step, "reduce", title, unscaled)

    def _update(self, step: int, computed: StepGradients, *, lr: float) -> None:
        factor = _clip_factor(computed.norm, self.task.clip_of(step))
        self.trace.keep_number(step, "clip", "clip factor", factor)
        factor_of_scaled = factor / computed.scale
        clipped = {}
        for name, scaled_gradient in computed.gradients.items():
            gradient = scaled_gradient * factor_of_scaled
            clipped[name] = gradient
            self.trace.keep(step, "clip", f"{name} clipped gradient", gradient)
        with torch.no_grad():
            signed = self._with_drawn_signs(step, clipped)
            self.optimizer.step(signed, lr)
            for name, value in self.trained.items():
                self.params[name].data.copy_(value)

    def _with_drawn_signs(self, step: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gradients of a perturbed run: those that rounding may give either sign have a drawn one."""
        free_signs = self.perturbation.free_signs
        if free_signs is None:
            return gradients
        drawn = dict(gradients)
        for name, gradient in gradients.items():
            is_free = free_signs(name, step)
            if is_free is None:
                continue
            # For all entries, so that what is drawn later does not depend on how many are free.
            bits = torch.randint(0, 2, gradient.shape, generator=self._generator)
            signs = 2 * bits - 1
            drawn[name] = torch.where(is_free, gradient * signs, gradient)
        return drawn

    def _rebalance(self, loads: Mapping[str, Tensor]) -> None:
        """The bias of an expert rises by `rate` where its load is under the mean, and falls above."""
        for name, load_E in loads.items():
            router = self._routers[name]
            if router.bias is None or not router.rate:
                continue
            load_E = load_E.double()
            directions_E = torch.sign(load_E.mean() - load_E)
            router.bias.data += router.rate * directions_E.to(router.bias.dtype)

    def _keep_state(self, step: int) -> None:
        for name, param in self.params.items():
            if name in self.trained:
                value = self.trained[name]
            elif param.dtype == self.types.params:
                value = param.data  # the bias of a router changes in place
            else:
                value = self.values[name]
            self.trace.keep(step, "update", name, value)
        for name, buffer in self.buffers.values.items():
            self.trace.keep(step, "update", name, buffer)
        for name, state in self.optimizer.state.items():
            for key, tensor in state.items():
                self.trace.keep(step, "moments", f"{name} {key}", tensor)

    def micro_batches(self, num_rows: int) -> list[range]:
        """Rows of each micro-batch, in the order in which they are added; exact types take all at
        once. A model that updates buffers by micro-batches has those of the run, in their order, as large as
        BatchNorm normalises them.
        """
        if self.buffers:
            own = self.task.batch.normalised_size
            return [range(start, start + own) for start in range(0, num_rows, own)]
        size = self.perturbation.micro_size
        if not size:
            size = num_rows if self.types.is_exact else self.task.batch.micro_size
        parts = []
        for start in range(0, num_rows, size):
            stop = min(start + size, num_rows)
            parts.append(range(start, stop))
        if self.perturbation.is_reversed:
            parts.reverse()
        return parts

    def perturbed(self, x: Tensor) -> Tensor:
        """x with a relative change of one unit in the last place, forward and backward."""
        if self.perturbation.noise_seed is None or not x.dtype.is_floating_point:
            return x
        eps = self.types.noise_of(x.dtype)
        signs = torch.randint(-1, 2, x.shape, generator=self._generator)
        factors = (1 + eps * signs.double()).to(x.dtype)
        return x * factors


def _owned_parameters(
    blocks: Mapping[str, nn.Module], ties: Mapping[str, str]
) -> dict[str, nn.Parameter]:
    """Parameters by global name; one that is shared is there once, under its first name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, param in named_parameters(blocks).items():
        if name in ties or id(param) in seen:
            continue
        seen.add(id(param))
        found[name] = param
    return found


def _num_targets(batch: Batch) -> int:
    """Targets that count, or preference pairs."""
    counts = batch.targets != IGNORE if batch.pairs is None else batch.pairs
    return int(counts.sum())


def _clip_factor(norm: float, largest_norm: float) -> float:
    """By which gradients of this norm are multiplied; `largest_norm` 0: they are not clipped."""
    if not largest_norm > 0:
        return 1.0
    return min(1.0, largest_norm / (norm + 1e-6))
