"""One-device reference of a run: plain modules, autograd and a plain optimizer on whole batches, every tensor recorded.

Uses none of the parallel code, nor the code that feeds ranks, reduces, clips or updates. It runs in
any number types, and perturbed: see `Perturbation` and weft/prove/bounds.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.read import Source
from weft.config.run import Run
from weft.core.axes import Box
from weft.data.samples import Samples
from weft.models import Family
from weft.models.common.batch import IGNORE, Batch, Extra
from weft.models.common.init import init_params, named_parameters, tie
from weft.models.common.moe import MoE, Router
from weft.prove.arithmetic import PLAIN, NumberTypes, Perturbation
from weft.prove.plain_optimizers import PlainOptimizer, plain_learning_rate
from weft.prove.raw_batch import batch_of, evaluated_samples, global_batch
from weft.prove.reference_pass import ReferencePass
from weft.prove.reference_trace import ReferenceTrace

FIRST_SCALE = 65536.0
"""Loss scale of float16 before the first step, in the definition of the run."""
OVERFLOW_MARGIN = 8.0
"""Gradients overflow in float16 on one layout and not on another where partial sums of fewer tokens
are held in it; so within this factor of the loss scale either is right."""


@dataclass(frozen=True)
class _StepGradients:
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
    """A run on one device.

    Args:
        perturbation: see there.
        records: whether tensors are kept; else only the numbers of steps.
        skipped: steps whose float16 gradients overflowed on the layout; None: it does not matter.
    """

    def __init__(
        self,
        run: Run,
        family: Family,
        samples: Samples,
        *,
        source: Source | None = None,
        perturbation: Perturbation = PLAIN,
        records: bool = True,
        skipped: frozenset[int] | None = None,
    ) -> None:
        self.run = run
        self.skipped = skipped
        self.samples = samples
        self.perturbation = perturbation
        self.types = NumberTypes.of(run)
        self.is_scaled = self.types.compute == torch.float16
        self.scale = FIRST_SCALE if self.is_scaled else 1.0
        self._generator = torch.Generator().manual_seed(perturbation.noise_seed or 0)
        ties = family.ties(run.model)
        self.blocks = dict(family.blocks(run.model))
        tie(self.blocks, ties)
        if perturbation.is_inside_blocks:
            self._perturb_modules()
        self.params = _owned_parameters(self.blocks, ties)
        self.values = self._initial_values(family, source)
        for name, param in self.params.items():
            param.data = self.values[name].to(self._module_dtype(name))
        self.trained = {
            name: self.values[name] for name, param in self.params.items() if param.requires_grad
        }
        self.optimizer = PlainOptimizer(self.trained, run.optim, family.axes(run.model))
        self.trace = ReferenceTrace(tuple(self.blocks), keeps_tensors=records)

    def _perturb_modules(self) -> None:
        """Add noise to the outputs of all modules that consist of no others."""

        def perturb(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            is_activation = isinstance(output, Tensor) and output.dim() > 0
            return self.perturbed(output) if is_activation else output

        seen: set[int] = set()
        for block in self.blocks.values():
            for module in block.modules():
                is_leaf = next(module.children(), None) is None
                if is_leaf and id(module) not in seen:
                    seen.add(id(module))
                    module.register_forward_hook(perturb)

    def _initial_values(self, family: Family, source: Source | None) -> dict[str, Tensor]:
        """Initial values in the dtype of parameters: stored ones, else drawn."""
        stored = frozenset(source.shapes) if source is not None else frozenset()
        values: dict[str, Tensor] = {}
        drawn: dict[str, Tensor] = {}
        for name, param in self.params.items():
            if source is not None and name in stored:
                whole = source.read(name, Box.whole(tuple(param.shape)))
                values[name] = whole.to(self.types.params)
            else:
                drawn[name] = torch.empty(param.shape, dtype=self.types.params)
        init_params(drawn, family.init(self.run.model), seed=self.run.seed)
        return {name: values.get(name, drawn.get(name)) for name in self.params}  # type: ignore[misc]

    def _module_dtype(self, name: str) -> torch.dtype:
        """Biases of routers stay in the dtype of parameters, all others are cast."""
        is_bias = any(self.params[name] is router.bias for router in self._routers.values())
        return self.types.params if is_bias else self.types.compute

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
        return self.trace

    def _evaluate(self, step: int) -> None:
        """The mean loss of some samples after the last step."""
        loss = 0.0
        num_targets = 0
        size = self.run.batch.global_size
        for numbers in evaluated_samples(self.samples, size):
            batch = batch_of(self.samples, numbers, later=self.run.model.reads_later_targets)
            num_targets += int((batch.targets != IGNORE).sum())
            for rows in self.micro_batches(len(batch.inputs)):
                loss += self._loss_alone(batch.rows(slice(rows.start, rows.stop)))
        self.trace.keep_number(step, "evaluation", "evaluation loss", loss / max(num_targets, 1))
        self.trace.keep_number(step, "evaluation", "number of targets", num_targets)

    @torch.no_grad()
    def _loss_alone(self, batch: Batch) -> float:
        """The sum over targets of the last block's loss."""
        x: Any = batch.inputs
        for block in self.blocks.values():
            out = block(x, batch)
            x = out.x if isinstance(out, Extra) else out
            if isinstance(x, Tensor):
                x = self.perturbed(x) if x.dim() else x
        return float(x.double())

    def batch_of_step(self, step: int) -> Batch:
        """The whole batch of step `step` (the first is 1)."""
        run = self.run
        return global_batch(
            self.samples,
            step - 1,
            global_size=run.batch.global_size,
            seed=run.seed,
            later=run.model.reads_later_targets,
        )

    def _step(self, step: int) -> None:
        batch = self.batch_of_step(step)
        num_targets = max(int((batch.targets != IGNORE).sum()), 1)
        self._keep_inputs(step, batch, num_targets)
        computed = self._gradients(batch, num_targets, self.scale)
        if self._overflows_elsewhere(step, computed):
            margin = 1 / OVERFLOW_MARGIN if computed.overflows else OVERFLOW_MARGIN
            other = self._gradients(batch, num_targets, self.scale * margin)
            if other.overflows != computed.overflows:  # a borderline case: as the layout does
                computed = other
        self._keep_gradients(step, computed, num_targets)
        lr = plain_learning_rate(step - 1, self.run.optim, self.run.steps)
        self.trace.lrs[step] = lr
        self.trace.keep_number(step, "update", "learning rate", lr)
        self.scale = computed.scale
        if computed.overflows:
            self.trace.skipped.add(step)
            self.scale = computed.scale / 2
        else:
            self._update(step, computed, lr=lr)
            self._rebalance(computed.forward.loads)
        self._keep_state(step)

    def _keep_inputs(self, step: int, batch: Batch, num_targets: int) -> None:
        """Keep the batch of a step, and the parameters as its forward uses them."""
        for name, tensor in vars(batch).items():
            if tensor is not None:
                self.trace.keep(step, "batch", name, tensor)
        if batch.documents is not None:
            self.trace.keep(step, "batch", "whole_documents", batch.documents)
        for name, param in self.params.items():
            self.trace.keep(step, "forward", f"{name} as used", param)
        self.trace.keep_number(step, "batch", "number of targets", num_targets)

    def _gradients(self, batch: Batch, num_targets: int, scale: float) -> _StepGradients:
        """Forward and backward of a batch with a loss scale."""
        forward = ReferencePass(
            self.blocks,
            {name: self.params[name] for name in self.trained},
            batch,
            loss_scale=scale,
            num_targets=num_targets,
            perturbed=self.perturbed,
            keeps_tensors=self.trace.keeps_tensors,
        )
        micro_batches = self.micro_batches(len(batch.inputs))
        sums = forward.run(micro_batches, reduce=self.types.reduce)
        gradients = {name: total.to(self.types.params) for name, total in sums.items()}
        squares = [float(gradient.double().square().sum()) for gradient in gradients.values()]
        norm = math.sqrt(sum(squares)) / scale
        overflows = self.is_scaled and not math.isfinite(norm)
        return _StepGradients(forward, gradients, scale, norm, overflows)

    def _overflows_elsewhere(self, step: int, computed: _StepGradients) -> bool:
        """Whether the gradients of the step overflow here or on the layout, but not on both."""
        if self.skipped is None or not self.is_scaled:
            return False
        return computed.overflows != (step in self.skipped)

    def _keep_gradients(self, step: int, computed: _StepGradients, num_targets: int) -> None:
        computed.forward.keep_in(self.trace, step)
        self.trace.keep_number(step, "loss", "loss", computed.forward.loss / num_targets)
        self.trace.keep_number(step, "norm", "gradient norm", computed.norm)
        for name, gradient in computed.gradients.items():
            unscaled = gradient.double() / computed.scale
            self.trace.keep(step, "backward", f"{name} gradient", unscaled)
            self.trace.keep(step, "reduce", f"{name} gradient", unscaled)

    def _update(self, step: int, computed: _StepGradients, *, lr: float) -> None:
        most = self.run.optim.clip
        factor = min(1.0, most / (computed.norm + 1e-6)) if most > 0 else 1.0
        self.trace.keep_number(step, "clip", "clip factor", factor)
        clipped = {}
        for name, gradient in computed.gradients.items():
            clipped[name] = gradient * (factor / computed.scale)
            self.trace.keep(step, "clip", f"{name} clipped gradient", clipped[name])
        with torch.no_grad():
            self.optimizer.step(self._with_drawn_signs(step, clipped), lr)
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
            if is_free is not None:
                signs = 2 * torch.randint(0, 2, gradient.shape, generator=self._generator) - 1
                drawn[name] = torch.where(is_free, gradient * signs, gradient)
        return drawn

    def _rebalance(self, loads: Mapping[str, Tensor]) -> None:
        """The bias of an expert rises by `rate` where its load is under the mean, and falls above."""
        for name, load in loads.items():
            router = self._routers[name]
            if router.bias is not None and router.rate:
                mean = load.double().mean()
                router.bias.data += router.rate * torch.sign(mean - load.double()).to(
                    router.bias.dtype
                )

    def _keep_state(self, step: int) -> None:
        for name, param in self.params.items():
            value = self.trained.get(name, self.values[name])
            is_bias = param.dtype == self.types.params and name not in self.trained
            self.trace.keep(step, "update", name, param.data if is_bias else value)
        for name, state in self.optimizer.state.items():
            for key, tensor in state.items():
                self.trace.keep(step, "moments", f"{name} {key}", tensor)

    def micro_batches(self, num_rows: int) -> list[range]:
        """Rows of each micro-batch, in the order in which they are added; exact types take all at
        once.
        """
        size = self.perturbation.micro_size or self.run.batch.micro_size
        if self.types.is_exact and not self.perturbation.micro_size:
            size = num_rows
        parts = [range(lo, min(lo + size, num_rows)) for lo in range(0, num_rows, size)]
        return parts[::-1] if self.perturbation.is_reversed else parts

    def perturbed(self, x: Tensor) -> Tensor:
        """x with a relative change of one unit in the last place, forward and backward."""
        if self.perturbation.noise_seed is None or not x.dtype.is_floating_point:
            return x
        eps = torch.finfo(x.dtype).eps
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
        if name not in ties and id(param) not in seen:
            seen.add(id(param))
            found[name] = param
    return found
