"""Forward and backward of a step through plain blocks, one block after the other; each rank computes whole sequences.

See Note [Live step].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.models.common.batch import Batch, Extra, activation_of
from weft.models.common.dropout_mode import CounterDropout
from weft.prove.arithmetic import NumberTypes
from weft.prove.live_step.kept_graphs import KeptGraphs
from weft.prove.live_step.meta_chain import MetaChain
from weft.prove.live_step.output_sketch import Projection, output_tensors
from weft.prove.live_step.owner_gradients import GradientNoise, OwnerGradients, joined, summed_noise
from weft.prove.live_step.units import Unit
from weft.prove.live_step.whole_params import WholeParameters

PLAIN = 0
"""Noise seed of a pass without noise."""
MAX_PLACES = 2**16
"""Modules of a block that may have noise of their own."""

OnGradient = Callable[[str, Tensor, GradientNoise], None]
"""Called with owner, this rank's part of its gradient (summed over its units) and what noise changes
in it; on every rank in the same order."""


class UnitPass(NamedTuple):
    """One pass of a unit: index of the unit among this rank's, and the seed of its noise."""

    unit: int
    seed: int


class _Forward(NamedTuple):
    """A forward of a block with its graph: leaves that were its input, and its output."""

    input: Any
    output: Any


@dataclass
class PassNumbers:
    """What the passes of one rank add up to, besides gradients.

    Attributes:
        sketches: [blocks, sequences], projections of whole outputs.
        sizes: [blocks, sequences], their Euclidean norms.
        widths: [blocks], features of an output.
        spread: [blocks], largest relative distance of a perturbed output.
        losses: [sequences], the loss of each unit under its first row, extra losses included.
        loss_spread: largest relative change of the loss of a perturbed unit.
        loads: tokens at each expert, by block.
    """

    sketches: Tensor
    sizes: Tensor
    widths: Tensor
    spread: Tensor
    losses: Tensor
    loss_spread: float = 0.0
    loads: dict[str, Tensor] = field(default_factory=dict)


class PlainPass:
    """The passes of one rank through the chain.

    Args:
        batches: of each unit.
        seed_of_loss: factor of the summed loss: loss scale over number of targets.
        most_kept_bytes: of graphs that this rank keeps from the forward to the backward; the forward
            of other blocks is computed twice.
    """

    def __init__(
        self,
        chain: MetaChain,
        whole: WholeParameters,
        types: NumberTypes,
        *,
        units: Sequence[Unit],
        batches: Sequence[Batch],
        num_sequences: int,
        projection: Projection,
        seed_of_loss: float,
        most_kept_bytes: int = 0,
    ) -> None:
        self.chain = chain
        self.whole = whole
        self.types = types
        self.units = units
        self.batches = batches
        self.projection = projection
        self.seed_of_loss = seed_of_loss
        self.device = projection.device
        self._names = tuple(chain.blocks)
        self._passes = _passes(units)
        self._inputs: dict[tuple[int, UnitPass], Any] = {}
        self._kept = KeptGraphs(most_kept_bytes)
        # The first blocks: those of which all passes have graphs, on this rank and on every rank.
        self._num_kept = self._num_kept_everywhere = len(self._names)
        self._graphs: dict[tuple[int, UnitPass], _Forward] = {}
        self._kept_leaves: dict[int, dict[str, Tensor]] = {}
        self._noise: int | None = None
        self.numbers = self._no_numbers(num_sequences)

    def _no_numbers(self, num_sequences: int) -> PassNumbers:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self.device)

        num_blocks = len(self._names)
        return PassNumbers(
            sketches=zeros(num_blocks, num_sequences),
            sizes=zeros(num_blocks, num_sequences),
            widths=zeros(num_blocks),
            spread=zeros(num_blocks),
            losses=zeros(num_sequences),
        )

    def run(self, on_gradient: OnGradient) -> PassNumbers:
        """Forward and backward of all units; every rank must call it."""
        with self._noise_hooks():
            self._forward()
            self._num_kept_everywhere = self.whole.least_over_ranks(self._num_kept)
            self._backward(on_gradient)
        return self.numbers

    def losses(self) -> Tensor:
        """The losses of all units by a forward alone; every rank must call it."""
        self._forward()
        return self.numbers.losses

    # forward

    def _forward(self) -> None:
        xs: dict[UnitPass, Any] = {each: self.batches[each.unit].inputs for each in self._passes}
        losses: dict[UnitPass, float] = {}
        for index, name in enumerate(self._names):
            values = self._values(name)
            outputs: dict[UnitPass, Any] = {}
            for each in self._passes:
                output = self._forward_of(index, each, xs[each], values)
                self._add_loss(each, output, losses, is_last=index == len(self._names) - 1)
                outputs[each] = _without_graph(activation_of(output))
                if each.seed == PLAIN:
                    self._keep_output(index, each, output)
            self._compare_noise(index, outputs)
            xs = outputs
        self._keep_losses(losses)

    def _forward_of(self, index: int, each: UnitPass, x: Any, values: Mapping[str, Tensor]) -> Any:
        """The output of a block, whose graph is kept while there is memory for graphs."""
        if not self._kept.has_room:
            # Another pass of this block may have had room before: its parameters are needed again all the same.
            self._num_kept = min(self._num_kept, index)
            self._inputs[index, each] = x
            with torch.no_grad():
                return self._call(index, each, x, values)
        # All passes of a block share its leaves: their gradients are those of one tensor.
        leaves = self._kept_leaves.get(index)
        if leaves is None:
            leaves = self._kept_leaves[index] = self._as_trained(values)
        x = _as_leaves(x)
        with self._kept.count():
            output = self._call(index, each, x, leaves)
        self._graphs[index, each] = _Forward(x, output)
        return output

    def _as_trained(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leaves with the values of a block's parameters; those that are trained require gradients."""
        trained = set(self.chain.trained)
        return {
            owner: value.detach().requires_grad_(owner in trained)
            for owner, value in values.items()
        }

    def _values(self, block: str) -> dict[str, Tensor]:
        """The parameters of a block by owner, in the dtype in which it computes."""
        stored = self.whole.gather(self.chain.of_block(block))
        values = {}
        for owner, value in stored.items():
            is_cast = owner not in self.chain.uncast and value.is_floating_point()
            values[owner] = value.to(self.types.compute) if is_cast else value
        return values

    def _call(self, index: int, each: UnitPass, x: Any, values: Mapping[str, Tensor]) -> Any:
        """The output of a block on whole sequences."""
        name = self._names[index]
        block = self.chain.blocks[name]
        batch = self.batches[each.unit]
        mode = CounterDropout(name, batch.draw_keys, documents_BT=batch.documents_of_sequences)
        with self._noise_of(index, each), mode:
            x = self._perturbed(x, place=0)
            return self._with_params(index, values, lambda: block(x, batch))

    @contextmanager
    def _noise_of(self, index: int, each: UnitPass) -> Iterator[None]:
        """While active, what a noisy pass perturbs has the noise of this block and pass: the same in
        the forward, in its repetition for the backward, and in parts that the backward recomputes.
        """
        if each.seed != PLAIN:
            self._noise = (each.seed * len(self._names) + index) * len(self.units) + each.unit
        try:
            yield
        finally:
            self._noise = None

    def _with_params(
        self, index: int, values: Mapping[str, Tensor], function: Callable[[], Any]
    ) -> Any:
        """What a function returns that is called while a block holds these parameters, by owner."""
        name = self._names[index]
        params = {f"block.{path}": values[owner] for path, owner in self.chain.owners[name].items()}
        return functional_call(_Caller(self.chain.blocks[name], function), params, ())

    def _add_loss(
        self, each: UnitPass, output: Any, losses: dict[UnitPass, float], *, is_last: bool
    ) -> None:
        value = 0.0
        if isinstance(output, Extra) and output.loss is not None:
            value += float(output.loss.detach().double())
        if is_last:
            value += float(activation_of(output).detach().double())
        losses[each] = losses.get(each, 0.0) + value

    @torch.no_grad()
    def _keep_output(self, index: int, each: UnitPass, output: Any) -> None:
        """Projections, sizes and loads of a plain output."""
        rows = list(self.units[each.unit].rows)
        for place, x in enumerate(output_tensors(output)):
            if place == 0:
                features = self.projection.features(x, self.projection.has_columns(x))
                self.numbers.widths[index] = features.shape[-1]
            wide = x.double()
            self.numbers.sketches[index, rows] += (1 + place) * self.projection.whole_rows(wide)
            self.numbers.sizes[index, rows] += (1 + place) * wide.flatten(1).norm(dim=1)
        if isinstance(output, Extra) and output.load is not None:
            name = self._names[index]
            before = self.numbers.loads.get(name)
            self.numbers.loads[name] = output.load if before is None else before + output.load

    @torch.no_grad()
    def _compare_noise(self, index: int, outputs: Mapping[UnitPass, Any]) -> None:
        for each, perturbed in outputs.items():
            if each.seed == PLAIN:
                continue
            plain = outputs[UnitPass(each.unit, PLAIN)]
            pairs = zip(output_tensors(plain), output_tensors(perturbed), strict=True)
            for right, other in pairs:
                distance, size = _norm_of_rows(other - right), _norm_of_rows(right)
                relative = distance / size.clamp(min=1e-30)
                spread = self.numbers.spread
                spread[index] = torch.maximum(spread[index], relative.max())

    def _keep_losses(self, losses: Mapping[UnitPass, float]) -> None:
        for each, value in losses.items():
            plain = losses[UnitPass(each.unit, PLAIN)]
            if each.seed == PLAIN:
                self.numbers.losses[self.units[each.unit].rows[0]] = value
            else:
                relative = abs(value - plain) / max(abs(plain), 1e-30)
                self.numbers.loss_spread = max(self.numbers.loss_spread, relative)

    # backward

    def _backward(self, on_gradient: OnGradient) -> None:
        trained = set(self.chain.trained)
        first_use = self.chain.first_use
        grads_of_outputs: dict[UnitPass, Any] = dict.fromkeys(self._passes)
        waiting: dict[str, list[OwnerGradients]] = {}
        like = torch.empty(0, dtype=self._sum_dtype, device=self.device)
        for index in reversed(range(len(self._names))):
            name = self._names[index]
            leaves = self._leaves_of(index)
            found = OwnerGradients(self._sum_dtype)
            for each in self._passes:
                grads_of_outputs[each] = self._backward_of(
                    index, each, leaves, grads_of_outputs[each], found
                )
            for owner in reversed(tuple(self.chain.of_block(name))):
                if owner not in trained:
                    continue
                waiting.setdefault(owner, []).append(found)
                # The backward goes from the last block to the first, so the first one that uses a
                # shared parameter completes its gradient.
                if first_use[owner] == name:
                    parts = waiting.pop(owner)
                    shape = self.chain.shapes[owner]
                    total = joined(owner, parts, shape=shape, like=like)
                    on_gradient(owner, total, summed_noise(owner, parts))

    def _leaves_of(self, index: int) -> dict[str, Tensor]:
        """The parameters of a block for its backward."""
        kept = self._kept_leaves.pop(index, {})
        if index < self._num_kept_everywhere:
            return kept
        # Every rank gathers, also one that has kept all graphs of the block: others have not.
        values = self._values(self._names[index])
        return kept or self._as_trained(values)

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.types.reduce, torch.float32)

    def _backward_of(
        self,
        index: int,
        each: UnitPass,
        leaves: Mapping[str, Tensor],
        grad_of_output: Any,
        found: OwnerGradients,
    ) -> Any:
        """The gradient of a block's input; its forward is repeated where no graph was kept."""
        forward = self._graphs.pop((index, each), None)
        if forward is None:
            x = _as_leaves(self._inputs.pop((index, each)))
            forward = _Forward(x, self._call(index, each, x, leaves))
        x, output = forward
        outputs, seeds = self._seeds(index, output, grad_of_output)
        inputs = [leaf for leaf in _tensors(x) if leaf.requires_grad]
        params = [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads: Sequence[Tensor | None] = [None] * (len(inputs) + len(params))
        if outputs and (inputs or params):
            wanted = [*inputs, *params]
            # A block may recompute parts of its forward in the backward (torch.utils.checkpoint).
            with self._noise_of(index, each):
                grads = self._with_params(
                    index,
                    leaves,
                    lambda: torch.autograd.grad(outputs, wanted, seeds, allow_unused=True),
                )
        owners = [owner for owner, leaf in leaves.items() if leaf.requires_grad]
        of_owners = dict(zip(owners, grads[len(inputs) :], strict=True))
        has_noisy = bool(self.units[each.unit].noise_seeds)
        found.add(of_owners, is_plain=each.seed == PLAIN, has_noisy=has_noisy)
        of_inputs = iter(grads[: len(inputs)])
        return tuple(next(of_inputs) if leaf.requires_grad else None for leaf in _tensors(x))

    def _seeds(
        self, index: int, output: Any, grad_of_output: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a block that are differentiated, and their gradients."""
        outputs: list[Tensor] = []
        seeds: list[Tensor] = []

        def add(tensor: Tensor, seed: Tensor | None) -> None:
            if seed is not None and tensor.requires_grad:
                outputs.append(tensor)
                seeds.append(seed)

        if isinstance(output, Extra) and output.loss is not None:
            add(output.loss, self._loss_seed(output.loss))
        if index == len(self._names) - 1:
            loss = activation_of(output)
            add(loss, self._loss_seed(loss))
            return outputs, seeds
        for tensor, seed in zip(_tensors(activation_of(output)), grad_of_output, strict=True):
            add(tensor, seed)
        return outputs, seeds

    def _loss_seed(self, loss: Tensor) -> Tensor:
        return torch.full_like(loss, self.seed_of_loss)

    # noise

    def _perturbed(self, x: Any, *, place: int) -> Any:
        """x with a relative change of at most one unit in the last place, forward and backward.

        Args:
            place: where in a block; the noise is a function of block, pass, place and shape.
        """
        if self._noise is None:
            return x
        # A generator for each place, since a repeated forward may run only some of its modules, and
        # must find the same noise.
        generator = torch.Generator().manual_seed(self._noise * MAX_PLACES + place)

        def perturbed(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.dim():
                return tensor
            dtype = tensor.dtype
            signs = torch.randint(-1, 2, tensor.shape, generator=generator, dtype=dtype)
            return tensor * (1 + torch.finfo(dtype).eps * signs.to(tensor.device))

        return tuple(map(perturbed, x)) if isinstance(x, tuple) else perturbed(x)

    @contextmanager
    def _noise_hooks(self) -> Iterator[None]:
        """While active, outputs of modules that consist of no others have noise in noisy passes."""

        def perturb(module: nn.Module, args: tuple[Any, ...], output: Any, *, place: int) -> Any:
            return self._perturbed(output, place=place)

        modules = {
            id(module): module
            for block in self.chain.blocks.values()
            for module in block.modules()
            if not any(True for _ in module.children())
        }
        handles = [
            module.register_forward_hook(partial(perturb, place=place))
            for place, module in enumerate(modules.values(), start=1)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Caller(nn.Module):
    """Calls a function; the block is there for `functional_call`, which gives it parameters meanwhile."""

    def __init__(self, block: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.block = block
        self.function = function

    def forward(self) -> Any:
        return self.function()


def _passes(units: Sequence[Unit]) -> tuple[UnitPass, ...]:
    """All passes of a rank; the noisy ones of a unit follow its plain one."""
    return tuple(
        UnitPass(number, seed)
        for number, unit in enumerate(units)
        for seed in (PLAIN, *unit.noise_seeds)
    )


def _norm_of_rows(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return norms


def _without_graph(x: Any) -> Any:
    return tuple(map(torch.Tensor.detach, x)) if isinstance(x, tuple) else x.detach()


def _tensors(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _as_leaves(x: Any) -> Any:
    """The tensors of x, cut from any graph; those of floating point require gradients."""
    if isinstance(x, tuple):
        return tuple(map(_as_leaves, x))
    leaf = x.detach()
    return leaf.requires_grad_(leaf.dtype.is_floating_point)
