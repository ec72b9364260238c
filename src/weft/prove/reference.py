"""One-device reference of a run: plain modules, autograd and a plain optimizer on whole batches, every tensor recorded.

Uses none of the parallel code, nor the code that feeds ranks, reduces, clips or updates. It runs in
any number types, and perturbed: see `Perturbation` and weft/prove/bounds.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.checkpoint.read import Source
from weft.config.optimizers import is_user_class, rule_names
from weft.config.run import Run
from weft.config.schema import OptimConfig
from weft.core.axes import Box
from weft.core.precision import Dtype
from weft.data.samples import Samples
from weft.models import Family
from weft.models.common.batch import IGNORE, Batch, Extra
from weft.models.common.init import init_params, named_parameters, tie
from weft.models.common.moe import MoE, Router
from weft.prove.plain_optimizers import PlainOptimizer, plain_learning_rate
from weft.prove.raw_batch import batch_of, evaluated_samples, global_batch
from weft.prove.report import Phase

FIRST_SCALE = 65536.0
"""Loss scale of float16 before the first step, in the definition of the run."""


OVERFLOW_MARGIN = 8.0
"""Gradients overflow in float16 on one layout and not on another where partial sums of fewer tokens
are held in it; so within this factor of the loss scale either is right."""


class TensorKey(NamedTuple):
    """A logical tensor of one step."""

    step: int
    phase: Phase
    tensor: str


@dataclass(frozen=True)
class Perturbation:
    """Changes that exact arithmetic would not notice: how far results move is what rounding explains.

    Attributes:
        noise_seed: activations at block boundaries, and their gradients, are multiplied by 1 plus or
            minus one unit of the last place; None: not.
        is_reversed: micro-batches are added in reverse order.
        micro_size: sequences a micro-batch; 0: as configured.
    """

    noise_seed: int | None = None
    is_reversed: bool = False
    micro_size: int = 0


PLAIN = Perturbation()


@dataclass
class ReferenceTrace:
    """What one device computes.

    Attributes:
        values: whole tensors and numbers by step, phase and logical name; loads under "forward".
        blocks: names of the blocks, in order.
        lrs: learning rate by step.
        skipped: steps whose gradients overflowed in float16, which change nothing.
    """

    blocks: tuple[str, ...]
    values: dict[TensorKey, Tensor] = field(default_factory=dict)
    lrs: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class NumberTypes:
    """Number types of parameters, computation and gradient sums."""

    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @staticmethod
    def of(run: Run) -> NumberTypes:
        """Those of a run."""
        precision = run.precision
        return NumberTypes(
            _dtype(precision.params),
            _dtype(precision.compute),
            _dtype(precision.reduce),
        )

    @property
    def eps(self) -> float:
        """The coarsest unit of rounding."""
        return max(torch.finfo(each).eps for each in (self.params, self.compute, self.reduce))

    @property
    def is_exact(self) -> bool:
        """Whether everything is float64."""
        return self.eps == torch.finfo(torch.float64).eps


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
        self.records = records
        self.types = NumberTypes.of(run)
        self.is_scaled = self.types.compute == torch.float16
        self.scale = FIRST_SCALE if self.is_scaled else 1.0
        self._generator = torch.Generator().manual_seed(perturbation.noise_seed or 0)
        ties = family.ties(run.model)
        self.blocks = dict(family.blocks(run.model))
        tie(self.blocks, ties)
        self.params = _owned_parameters(self.blocks, ties)
        self.values = self._initial_values(family, source)
        for name, param in self.params.items():
            param.data = self.values[name].to(self._module_dtype(name))
        self.trained = {
            name: self.values[name] for name, param in self.params.items() if param.requires_grad
        }
        self.optimizer = PlainOptimizer(self.trained, run.optim, family.axes(run.model))
        self.trace = ReferenceTrace(tuple(self.blocks))

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
        self._keep_number(step, "evaluation", "evaluation loss", loss / max(num_targets, 1))
        self._keep_number(step, "evaluation", "number of targets", num_targets)

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
        run, trace = self.run, self.trace
        batch = self.batch_of_step(step)
        for name, tensor in vars(batch).items():
            if tensor is not None:
                self._keep(step, "batch", name, tensor)
        if batch.documents is not None:
            self._keep(step, "batch", "whole_documents", batch.documents)
        for name, param in self.params.items():
            self._keep(step, "forward", f"{name} as used", param)
        num_targets = max(int((batch.targets != IGNORE).sum()), 1)
        self._keep_number(step, "batch", "number of targets", num_targets)
        scale = self.scale
        forward = _Forward(self, step, batch, num_targets)
        gradients = forward.run()
        norm = self._norm(gradients)
        overflows = self.is_scaled and not math.isfinite(norm)
        if self.skipped is not None and self.is_scaled and overflows != (step in self.skipped):
            self.scale = scale / OVERFLOW_MARGIN if overflows else scale * OVERFLOW_MARGIN
            other = _Forward(self, step, batch, num_targets)
            other_gradients = other.run()
            other_norm = self._norm(other_gradients)
            if overflows == math.isfinite(other_norm):  # a borderline case: as the layout does
                forward, gradients, norm = other, other_gradients, other_norm
                overflows = not overflows
            else:
                self.scale = scale
        loss = forward.loss / num_targets
        self._keep_number(step, "loss", "loss", loss)
        lr = plain_learning_rate(step - 1, run.optim, run.steps)
        trace.lrs[step] = lr
        self._keep_number(step, "norm", "gradient norm", norm)
        self._keep_number(step, "update", "learning rate", lr)
        for name, gradient in gradients.items():
            self._keep(step, "backward", f"{name} gradient", gradient.double() / self.scale)
            self._keep(step, "reduce", f"{name} gradient", gradient.double() / self.scale)
        if overflows:
            trace.skipped.add(step)
        else:
            self._update(step, gradients, norm=norm, lr=lr)
            self._rebalance(forward.loads)
        self.scale = scale / 2 if overflows else scale
        self._keep_state(step)

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The global norm, without the loss scale."""
        squares = [float(gradient.double().square().sum()) for gradient in gradients.values()]
        return math.sqrt(sum(squares)) / self.scale

    def _update(
        self, step: int, gradients: Mapping[str, Tensor], *, norm: float, lr: float
    ) -> None:
        most = self.run.optim.clip
        factor = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
        self._keep_number(step, "clip", "clip factor", factor)
        clipped = {}
        for name, gradient in gradients.items():
            clipped[name] = gradient * (factor / self.scale)
            self._keep(step, "clip", f"{name} clipped gradient", clipped[name])
        with torch.no_grad():
            self.optimizer.step(clipped, lr)
            for name, value in self.trained.items():
                self.params[name].data.copy_(value)

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
            self._keep(step, "update", name, param.data if is_bias else value)
        for name, state in self.optimizer.state.items():
            for key, tensor in state.items():
                self._keep(step, "moments", f"{name} {key}", tensor)

    def _keep(self, step: int, phase: Phase, name: str, tensor: Tensor) -> None:
        if self.records:
            self.trace.values[TensorKey(step, phase, name)] = tensor.detach().clone()

    def _keep_number(self, step: int, phase: Phase, name: str, value: float) -> None:
        self.trace.values[TensorKey(step, phase, name)] = torch.tensor(
            float(value), dtype=torch.float64
        )

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


class _Forward:
    """Forward and backward of one step."""

    def __init__(self, reference: Reference, step: int, batch: Batch, num_targets: int) -> None:
        self.reference = reference
        self.step = step
        self.batch = batch
        self.seed = reference.scale / num_targets
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.loads: dict[str, Tensor] = {}
        self.outputs: dict[str, dict[int, Tensor]] = {}
        self.gradients: dict[str, dict[int, Tensor]] = {}

    def run(self) -> dict[str, Tensor]:
        """The summed gradients of all micro-batches, in the dtype of parameters."""
        reference = self.reference
        totals: dict[str, Tensor] = {}
        for name, value in reference.trained.items():
            totals[name] = torch.zeros(value.shape, dtype=reference.types.reduce)
        for rows in reference.micro_batches(len(self.batch.inputs)):
            self._micro_batch(rows)
            for name in reference.trained:
                param = reference.params[name]
                if param.grad is not None:
                    totals[name] += param.grad.to(totals[name].dtype)
                    param.grad = None
        self._keep_all()
        return {name: total.to(reference.types.params) for name, total in totals.items()}

    def _micro_batch(self, rows: range) -> None:
        part = self.batch.rows(slice(rows.start, rows.stop))
        x: Any = part.inputs
        losses: list[Tensor] = []
        for name, block in self.reference.blocks.items():
            out = block(x, part)
            if isinstance(out, Extra):
                if out.loss is not None:
                    losses.append(out.loss)
                    self._add(f"{name}.extra loss", out.loss)
                if out.load is not None:
                    self.loads[name] = self.loads.get(name, 0) + out.load
                out = out.x
            x = out
            if not isinstance(x, Tensor):  # several outputs, which the loss reads
                x = tuple(map(self.reference.perturbed, x))
            elif x.dim():
                x = self._record(name, rows, x)
        self._add(f"{name}.loss", x)
        losses.append(x)
        needed = [loss for loss in losses if loss.requires_grad]
        seeds = [torch.tensor(self.seed, dtype=torch.float64).to(loss.dtype) for loss in needed]
        torch.autograd.backward(needed, seeds)

    def _add(self, name: str, value: Tensor) -> None:
        number = float(value.detach().double())
        self.sums[name] = self.sums.get(name, 0.0) + number
        self.loss += number

    def _record(self, name: str, rows: range, x: Tensor) -> Tensor:
        if not self.reference.records:
            return self.reference.perturbed(x)
        self.outputs.setdefault(name, {})[rows.start] = x.detach().clone()
        if x.requires_grad:
            parts = self.gradients.setdefault(name, {})

            def keep(gradient: Tensor) -> None:
                parts[rows.start] = gradient.detach().double() / self.reference.scale

            x.register_hook(keep)
        return self.reference.perturbed(x)

    def _keep_all(self) -> None:
        reference = self.reference
        for name, value in self.sums.items():
            reference._keep_number(self.step, "loss", name, value)
        for name, load in self.loads.items():
            reference._keep(self.step, "forward", f"{name}.expert load", load)
        for name, parts in self.outputs.items():
            reference._keep(self.step, "forward", f"{name}.output", _joined(parts))
        for name, parts in self.gradients.items():
            reference._keep(self.step, "backward", f"{name}.output gradient", _joined(parts))


def _joined(parts: Mapping[int, Tensor]) -> Tensor:
    return torch.cat([parts[start] for start in sorted(parts)])


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


def _dtype(name: Dtype) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def in_float64(run: Run) -> Run:
    """The run with float64 in place of its number types."""
    wide = {"params": "float64", "compute": "float64", "reduce": "float64"}
    return run.with_values({f"precision.{key}": value for key, value in wide.items()})


def magnifies_noise(optim: OptimConfig) -> bool:
    """Whether a gradient that is zero in exact arithmetic, and rounding noise in any other, may have
    an update of full size: that of a sign, or of a ratio without a lower bound.
    """
    return any(name in ("lion", "adafactor") or is_user_class(name) for name in rule_names(optim))


def has_jumps(optim: OptimConfig) -> bool:
    """Whether a rounding error of float32 may change an update by far more than itself: by the sign
    of an entry that is small beside the others, or by rounding a matrix to bfloat16; of a user's
    class that is not known.
    """
    return any(name in ("lion", "muon") or is_user_class(name) for name in rule_names(optim))


def perturbations(run: Run) -> Sequence[Perturbation]:
    """What bounds are derived from; none where everything is float64 and updates are proportional
    to gradients, or are damped where these are rounding noise.
    """
    if NumberTypes.of(run).is_exact and not magnifies_noise(run.optim):
        return ()
    smaller = 1 if run.batch.micro_size > 1 else 2
    return (
        Perturbation(noise_seed=1, is_reversed=True),
        replace(Perturbation(noise_seed=2), micro_size=smaller),
    )
