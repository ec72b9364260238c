"""The optimizer of a run: rules applied to the shards of named parameters, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.core.shard import DimAxis
from weft.parallel.zero.matrix_shards import MatrixExchange
from weft.parallel.zero.param_entries import ParamEntries
from weft.parallel.zero.state_codes import StateBlocks
from weft.train.optimizers.contract import Optimizer, State
from weft.train.optimizers.groups import GroupSettings, group_names, make_rule, splits_stacked
from weft.train.optimizers.states_in_8_bits import StatesIn8Bits
from weft.train.optimizers.user_class import run_with_sums

LogicalAxes = Mapping[str, tuple[DimAxis, ...]]
"""Parameter name -> logical axis of each dim."""


class StepOptimizer(Protocol):
    """What a training step needs: set each group's "lr", then `step()`. torch's own optimizers fit
    too.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Settings of groups of parameters."""
        ...

    def step(self) -> object:
        """Update every parameter that has a gradient."""
        ...


@dataclass(frozen=True)
class MatrixTraffic:
    """The exchange of the matrices of one group in a step.

    Attributes:
        axes: mesh axes along which they are spread.
        sent_bytes: what this rank sends.
    """

    axes: tuple[str, ...]
    sent_bytes: int


@dataclass(frozen=True)
class RuleGroup:
    """Parameters with one update rule and equal settings.

    Attributes:
        exchanges: of a rule that needs whole matrices.
        codes: of states in 8 bits.
    """

    settings: GroupSettings
    names: tuple[str, ...]
    rule: Optimizer
    exchanges: tuple[MatrixExchange, ...]
    codes: StatesIn8Bits | None = None


class NamedOptimizer:
    """Parameters by global name, in groups of one update rule and equal settings.

    Args:
        params: this rank's entries of each parameter.
        decay_names: parameters with weight decay where no group says otherwise; default: the
            matrices.
        logical_axes: of parameters with a `Stacked` dim, on one device; `attach` has them of shards.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim: OptimConfig,
        *,
        decay_names: Collection[str] | None = None,
        logical_axes: LogicalAxes | None = None,
    ) -> None:
        self.params = dict(params)
        self.optim = optim
        self.decay_names = decay_names
        self.comm: Comm | None = None
        self.fixed_order = False
        self.owners: dict[str, str] = {}
        self.entries: dict[str, ParamEntries] = {}
        for name, param in params.items():
            axes = (logical_axes or {}).get(name, ())
            self.entries[name] = ParamEntries.whole(tuple(param.shape), axes)

    def attach(
        self,
        entries: Mapping[str, ParamEntries],
        comm: Comm,
        *,
        owners: Mapping[str, str],
        fixed_order: bool = False,
    ) -> None:
        """Say which entries of which parameters are where, before the first use.

        Args:
            entries: of all trained parameters of this rank's stages, in the order of the model.
            owners: name of the owner of each of them: a tied parameter is updated as its owner is,
                on every stage that has it.
            fixed_order: whether bits may not depend on how parameters are sharded.
        """
        # Groups, and the shapes of states in them, follow from what is attached; both are made once.
        assert "groups" not in self.__dict__, "state exists already"
        self.entries = dict(entries)
        self.owners = dict(owners)
        self.comm = comm
        self.fixed_order = fixed_order

    @cached_property
    def groups(self) -> tuple[RuleGroup, ...]:
        """The groups with their update rules."""
        shapes = {name: each.shape for name, each in self.entries.items()}
        decay_names = self.decay_names
        if decay_names is None:
            decay_names = [name for name, shape in shapes.items() if len(shape) >= 2]
        found = []
        groups = group_names(self.optim, shapes, decay_names=decay_names, owners=self.owners)
        for settings, names in groups.items():
            rule = make_rule(self.optim, settings, fixed_order=self.fixed_order)
            if rule.kind == "whole_matrix":
                exchanges = self._exchanges_of(names)
            else:
                exchanges = ()
            codes = None
            if settings.state_block:
                entries = {name: self.entries[name] for name in names}
                codes = StatesIn8Bits(rule, entries, settings.state_block, self.comm)
            found.append(RuleGroup(settings, names, rule, exchanges, codes))
        return tuple(found)

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        """{"names", "lr", "weight_decay", "lr_scale"} of each group; `lr` is read at every step."""
        return [
            {
                "names": group.names,
                "lr": self.optim.lr,
                "weight_decay": group.settings.weight_decay,
                "lr_scale": group.settings.lr_scale,
            }
            for group in self.groups
        ]

    @cached_property
    def state(self) -> dict[str, State]:
        """Parameter name -> the rule's key ("exp_avg", ...) -> tensor; zero before the first step."""
        groups: dict[str, RuleGroup] = {}
        for group in self.groups:
            groups.update(dict.fromkeys(group.names, group))
        found = {}
        for name, param in self.params.items():
            group = groups[name]
            if group.codes is not None:
                found[name] = group.codes.fresh(name, param)
            else:
                found[name] = group.rule.fresh_state(param, self.entries[name].shape)
        return found

    @cached_property
    def _absent(self) -> dict[str, State]:
        """Stand-ins for the state of parameters that this rank holds no entries of, but in whose
        sums it takes part.
        """
        return {}

    def _exchanges_of(self, names: Sequence[str]) -> tuple[MatrixExchange, ...]:
        """One exchange for the parameters that are spread over the same axes."""
        by_axes: dict[tuple[str, ...], dict[str, ParamEntries]] = {}
        for name in names:
            entries = self.entries[name]
            params = by_axes.setdefault(entries.axes, {})
            params[name] = entries
        splits = splits_stacked(self.optim)
        exchanges = []
        for params in by_axes.values():
            exchange = MatrixExchange(params, self.comm, splits_stacked=splits)
            exchanges.append(exchange)
        return tuple(exchanges)

    def matrix_traffic(self) -> tuple[MatrixTraffic, ...]:
        """What this rank sends in a step for matrices whose entries are spread over ranks."""
        found: list[MatrixTraffic] = []
        for group in self.groups:
            itemsize = self._gather_dtype(group.rule).itemsize
            found.extend(
                MatrixTraffic(axes=exchange.axes, sent_bytes=exchange.sent_bytes(itemsize))
                for exchange in group.exchanges
            )
        return tuple(found)

    def _gather_dtype(self, rule: Optimizer) -> torch.dtype:
        return rule.gather_dtype(self._like.dtype)

    @property
    def _like(self) -> Tensor:
        """Any parameter here; an empty one where this rank holds none."""
        for param in self.params.values():
            return param
        if self.comm is not None:
            device = self.comm.device
        else:
            device = None
        return torch.zeros(0, device=device)

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes `skip`."""
        return all(group.rule.skips_on_device for group in self.groups)

    @torch.no_grad()
    def step(self, *, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient; a collective where a rule needs whole
        matrices or sums.

        Args:
            skip: float32 scalar on the device; 1: nothing is to change.
        """
        for group, values in zip(self.groups, self.param_groups, strict=True):
            settings = {
                "lr": values["lr"] * values["lr_scale"],
                "weight_decay": values["weight_decay"],
            }
            if group.rule.kind == "elementwise":
                self._update(group, settings, skip)
            elif group.rule.kind == "reductions":
                self._update_with_sums(group, settings)
            else:
                for exchange in group.exchanges:
                    self._update_matrices(group, exchange, settings)

    def _grads(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gradients of those parameters that this rank holds entries of."""
        grads: dict[str, Tensor] = {}
        for name in names:
            param = self.params.get(name)
            if param is not None and param.grad is not None:
                grads[name] = param.grad
        return grads

    def _with_states(
        self, group: RuleGroup, names: Sequence[str]
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, State]]]:
        """Gradients and states of those parameters that this rank holds entries of; of states in 8
        bits their values, part by part, of which codes are made when the part has been updated.
        """
        codes = group.codes
        if codes is None:
            grads = self._grads(names)
            yield grads, {name: self.state[name] for name in grads}
            return
        for part in codes.parts(names):
            grads = self._grads(part)
            values = {
                name: codes.values(name, self.state[name], dtype=self.params[name].dtype)
                for name in grads
            }
            yield grads, values
            codes.store(part, self.state, values)

    def _update(self, group: RuleGroup, settings: Mapping[str, float], skip: Tensor | None) -> None:
        update = group.rule.update_all
        if skip is not None:
            update = partial(group.rule.update_all_unless, skip)
        for grads, states in self._with_states(group, group.names):
            if grads:
                update(
                    [self.params[name] for name in grads],
                    list(grads.values()),
                    list(states.values()),
                    lr=settings["lr"],
                    weight_decay=settings["weight_decay"],
                )

    def _update_matrices(
        self, group: RuleGroup, exchange: MatrixExchange, settings: Mapping[str, float]
    ) -> None:
        rule = group.rule
        dtype = self._gather_dtype(rule)
        like = self._like.new_zeros(0, dtype=dtype)
        grads = self._grads(exchange.names)
        directions = {}
        for own, states in self._with_states(group, exchange.names):
            for name, grad in own.items():
                directions[name] = rule.direction(grad, states[name]).to(dtype)
        # The owner of a matrix expects this rank's entries of it, also where they have no gradient.
        for name in exchange.names:
            if name in self.params and name not in grads:
                directions[name] = torch.zeros_like(self.params[name], dtype=dtype)
        for each in exchange.run(directions, rule.transform, like=like):
            name = each.matrix.name
            if name in grads:
                rule.apply(
                    each.piece.view(self.params[name]),
                    each.values,
                    lr=settings["lr"],
                    weight_decay=settings["weight_decay"],
                    shape=each.matrix.shape,
                )

    def _update_with_sums(self, group: RuleGroup, settings: Mapping[str, float]) -> None:
        grads = self._grads(group.names)
        by_axes: dict[tuple[str, ...], list[str]] = {}
        for name in group.names:
            # A rank without entries of a parameter adds nothing, and calls the all-reduce of those that have.
            if name in grads or name not in self.params:
                by_axes.setdefault(self.entries[name].axes, []).append(name)
        empty = self._like.new_zeros(0)
        for axes, members in by_axes.items():
            run_with_sums(
                group.rule,
                [self.params.get(name, empty) for name in members],
                [grads.get(name, empty) for name in members],
                [self._state_or_absent(group.rule, name) for name in members],
                entries=[self.entries[name] for name in members],
                add=partial(self._add_sums, axes),
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
            )

    def _state_or_absent(self, rule: Optimizer, name: str) -> State:
        """The state of a parameter; a stand-in where this rank holds no entries of it but takes
        part in its sums.
        """
        if name in self.state:
            return self.state[name]
        if name not in self._absent:
            nothing = self._like.new_zeros(0)
            shape = self.entries[name].shape
            self._absent[name] = rule.fresh_state(nothing, shape)
        return self._absent[name]

    def _add_sums(
        self, axes: tuple[str, ...], sums: Sequence[Sequence[Tensor]]
    ) -> Sequence[Sequence[Tensor]]:
        """Add the partial sums of all ranks along some axes, in one all-reduce."""
        if self.comm is None or not axes:
            return sums
        parts = [each.reshape(-1) for own in sums for each in own]
        total = self.comm.all_reduce(torch.cat(parts), axes)
        start = 0
        totals = []
        for own in sums:
            received = []
            for each in own:
                stop = start + each.numel()
                received.append(total[start:stop].view(each.shape))
                start = stop
            totals.append(received)
        return totals

    def state_keys(self) -> dict[str, frozenset[str]]:
        """Keys of the state of every trained parameter of this rank's stages."""
        found = {}
        for group in self.groups:
            for name in group.names:
                ndim = len(self.entries[name].shape)
                keys = frozenset(group.rule.state_axes(ndim))
                found[name] = keys if group.codes is None else group.codes.state_keys(name)
        return found

    def state_blocks(self) -> dict[str, StateBlocks]:
        """The blocks of each parameter here whose states have 8 bits."""
        found: dict[str, StateBlocks] = {}
        for group in self.groups:
            if group.codes is not None:
                found.update(group.codes.blocks)
        return {name: blocks for name, blocks in found.items() if name in self.params}


def make_optimizer(
    params: Mapping[str, Tensor],
    optim: OptimConfig,
    *,
    decay_names: Collection[str] | None = None,
    logical_axes: LogicalAxes | None = None,
) -> NamedOptimizer:
    """The optimizer that `optim` describes; weight decay applies to `decay_names` (default: the
    matrices).
    """
    return NamedOptimizer(params, optim, decay_names=decay_names, logical_axes=logical_axes)


def matrices(params: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters with two dims or more: weights and embeddings, not biases or norms."""
    return frozenset(name for name, param in params.items() if param.ndim >= 2)


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of step `step` (the first is 0) of a run of `total_steps`.

    ```
    lr      ┌───────╮            constant   stays at lr
           ╱         ╲           linear     straight down from the end of the warm-up
          ╱           ╲          cosine     half a cosine down from there
    last_lr            ╰─       wsd        stays at lr, straight down over the last `cooldown` of all steps
          warm-up   decay
    ```

    The warm-up rises linearly and reaches `lr` in its last step. `last_lr`, the share
    `min_lr` of `lr`, is reached at `total_steps`, one step after the last, and held from there on:
    the rate never rises after the warm-up.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    last_lr = optim.last_lr
    return last_lr + (optim.lr - last_lr) * _decay_factor(step, optim, total_steps)


def _decay_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Position of the rate between `last_lr` (0) and `lr` (1)."""
    if optim.decay == "constant":
        return 1.0
    start: float = optim.warmup
    if optim.decay == "wsd":
        start = max(start, total_steps * (1 - optim.cooldown))
    progress = _progress(step, start=start, end=total_steps)
    if optim.decay == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress


def _progress(step: int, *, start: float, end: float) -> float:
    """Fraction of the way from `start` to `end`, 0 to 1."""
    if start >= end:
        return float(step >= end)
    fraction = (step - start) / (end - start)
    return min(max(fraction, 0.0), 1.0)
