"""Forward and backward of one step of the one-device reference: micro-batch after micro-batch through a plain chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch, Extra, activation_of
from weft.models.common.dropout_mode import run_block
from weft.prove.reference_trace import ReferenceTrace, TensorKey


@dataclass
class ReferencePass:
    """The micro-batches of one step.

    Args:
        blocks: the chain.
        params: its trained parameters.
        batch: of the whole step.
        loss_scale: factor of the gradients.
        num_targets: by which the loss is divided.
        perturbed: applied to what passes from block to block.
        keeps_tensors: whether activations and their gradients are kept.

    Attributes:
        loss: summed over targets, with extra losses.
        sums: losses of each block.
        sum_types: number type of each.
        loads: tokens at each expert, by block.
        outputs: output of a block and the first row of its micro-batch.
        gradients: of these outputs.
    """

    blocks: Mapping[str, nn.Module]
    params: Mapping[str, nn.Parameter]
    batch: Batch
    loss_scale: float
    num_targets: int
    perturbed: Callable[[Tensor], Tensor]
    keeps_tensors: bool
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    sum_types: dict[str, torch.dtype] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    gradients: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def run(self, micro_batches: Iterable[range], *, reduce: torch.dtype) -> dict[str, Tensor]:
        """The gradient of every parameter.

        Args:
            micro_batches: rows of each.
            reduce: number type of the sums over micro-batches.
        """
        totals: dict[str, Tensor] = {}
        for name, param in self.params.items():
            totals[name] = torch.zeros(param.shape, dtype=reduce)
        for rows in micro_batches:
            self._micro_batch(rows)
            for name, param in self.params.items():
                if param.grad is None:
                    continue
                totals[name] += param.grad.to(reduce)
                # Sums over micro-batches have a type of their own, in which autograd would not add them.
                param.grad = None
        return totals

    def keep_in(self, trace: ReferenceTrace, step: int) -> None:
        """Keep what was computed as that of a step."""
        for name, value in self.sums.items():
            trace.keep_number(step, "loss", name, value)
            trace.types[TensorKey(step, "loss", name)] = self.sum_types[name]
        for name, load in self.loads.items():
            trace.keep(step, "forward", f"{name}.expert load", load)
        for name, parts in self.outputs.items():
            output = _joined(parts)
            trace.keep(step, "forward", f"{name}.output", output)
        for name, parts in self.gradients.items():
            gradient = _joined(parts)
            trace.keep(step, "backward", f"{name}.output gradient", gradient)

    def _micro_batch(self, rows: range) -> None:
        part = self.batch.rows(slice(rows.start, rows.stop))
        x: Any = part.inputs
        losses: list[Tensor] = []
        for name, block in self.blocks.items():
            out = run_block(name, block, x, part)
            if isinstance(out, Extra):
                losses.extend(self._take_extra(name, out))
            x = activation_of(out)
            if not isinstance(x, Tensor):  # several outputs, which the loss reads
                x = tuple(map(self.perturbed, x))
            elif x.dim():
                x = self._take_output(name, rows, x)
        self._add(f"{name}.loss", x)
        losses.append(x)
        self._backward(losses)

    def _backward(self, losses: list[Tensor]) -> None:
        scale = self.loss_scale / self.num_targets
        seed = torch.tensor(scale, dtype=torch.float64)
        trained = []
        seeds = []
        for loss in losses:
            if loss.requires_grad:
                trained.append(loss)
                seeds.append(seed.to(loss.dtype))
        torch.autograd.backward(trained, seeds)

    def _take_extra(self, name: str, extra: Extra) -> list[Tensor]:
        """Count loads and the extra loss of a block; the losses that are added."""
        if extra.load is not None:
            load_before = self.loads.get(name, 0)
            self.loads[name] = load_before + extra.load
        if extra.loss is None:
            return []
        self._add(f"{name}.extra loss", extra.loss)
        return [extra.loss]

    def _add(self, name: str, value: Tensor) -> None:
        number = float(value.detach().double())
        sum_before = self.sums.get(name, 0.0)
        self.sums[name] = sum_before + number
        self.sum_types[name] = value.dtype
        self.loss += number

    def _take_output(self, name: str, rows: range, x: Tensor) -> Tensor:
        """Keep the output of a block and its gradient; what the next block gets."""
        if not self.keeps_tensors:
            return self.perturbed(x)
        outputs = self.outputs.setdefault(name, {})
        outputs[rows.start] = x.detach().clone()
        if x.requires_grad:
            gradients = self.gradients.setdefault(name, {})

            def keep(gradient: Tensor) -> None:
                # In float64, since a small gradient without its loss scale is zero in float16.
                gradients[rows.start] = gradient.detach().double() / self.loss_scale

            x.register_hook(keep)
        return self.perturbed(x)


def _joined(parts: Mapping[int, Tensor]) -> Tensor:
    """The rows of all micro-batches, in their order."""
    in_order = [parts[start] for start in sorted(parts)]
    return torch.cat(in_order)
