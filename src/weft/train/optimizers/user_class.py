"""Optimizer classes of users: `package.module:Class` loaded, made with their options, and checked against the contract."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.config.user_code import load_object
from weft.core.axes import Box, boxes_of_range
from weft.errors import ConfigError, Fault, did_you_mean, type_and_message
from weft.parallel.zero.param_entries import ParamEntries, state_shape
from weft.train.optimizers.contract import Optimizer, State

KEY = "optim.name"
KINDS = ("elementwise", "whole_matrix", "reductions")
STATE_AXES = ("entries", "rows", "columns", "scalar")
CHECK_SHAPE = (6, 5)
CHECK_STEPS = 3
CUT = 13
"""Entries of the first of the two parts in which the check updates a parameter."""
LR, WEIGHT_DECAY = 1e-2, 0.1


def make_user_optimizer(name: str, options: Mapping[str, Any]) -> Optimizer:
    """An instance of a user's class, whose contract was checked.

    Raises:
        ConfigError: the class cannot be loaded, does not take these options, or violates its
            contract.
    """
    optimizer_class = load_class(name)
    optimizer = _construct(name, optimizer_class, options)
    check_contract(optimizer, name=name)
    return optimizer


def class_faults(name: str, options: Mapping[str, Any]) -> tuple[Fault, ...]:
    """What is wrong with a user's class and its options."""
    try:
        make_user_optimizer(name, options)
    except ConfigError as error:
        return error.faults
    return ()


def load_class(name: str) -> type[Optimizer]:
    """The class that a name means.

    Raises:
        ConfigError: it cannot be loaded, or is no optimizer.
    """
    found = load_object(name, key=KEY)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        is_torch = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
        what = "is a torch optimizer" if is_torch else "is no optimizer class"
        raise ConfigError(
            Fault(
                KEY,
                what,
                got=repr(name),
                need="a subclass of weft.Optimizer",
                fix="see docs/optimizers.md",
            )
        )
    return found


def _construct(
    name: str, optimizer_class: type[Optimizer], options: Mapping[str, Any]
) -> Optimizer:
    known = list(inspect.signature(optimizer_class).parameters)
    for option in options:
        if option not in known and "kwargs" not in known:
            fix = did_you_mean(option, known) if known else "it has no options"
            raise ConfigError(
                Fault(f"optim.options.{option}", f"{name} has no such option", fix=fix)
            )
    try:
        return optimizer_class(**options)
    except Exception as error:
        what = f"{name} raises with these options: {type_and_message(error)}"
        raise ConfigError(Fault("optim.options", what, got=str(dict(options)))) from error


def check_contract(optimizer: Optimizer, *, name: str) -> None:
    """Check on random numbers that an optimizer does what it declares.

    It takes three steps on a parameter, and on the same parameter in two parts: the results must be
    equal, as the entries of a part may not depend on those of the other one.

    Raises:
        ConfigError: they are not, or a state or a parameter is not changed as the contract says.
    """
    _ContractCheck(optimizer, name).run()


class _ContractCheck:
    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.optimizer = optimizer
        self.name = name
        generator = torch.Generator().manual_seed(0)
        size = (1 + CHECK_STEPS, *CHECK_SHAPE)
        numbers = torch.randn(size, dtype=torch.float64, generator=generator)
        self.start, *self.grads = numbers

    def run(self) -> None:
        self._check_declaration()
        whole = ParamEntries.whole(CHECK_SHAPE)
        parts = (_part(0, CUT), _part(CUT, self.start.numel()))
        try:
            reference = self._train([whole])
            joined = self._train(parts)
            again = self._train([whole])
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's class raises is reported
            self._reject(f"raises {type_and_message(error)}")
        if not torch.equal(reference, again):
            self._reject("gives other values for the same gradients the second time")
        if torch.equal(reference, self.start.flatten()):
            self._reject("does not change the parameter in place")
        if not torch.allclose(reference, joined, rtol=1e-9, atol=1e-12):
            self._reject(
                f"declares {self.optimizer.kind} but mixes entries: "
                f"a parameter updated in two parts gets other values"
            )

    def _check_declaration(self) -> None:
        kind = self.optimizer.kind
        if kind not in KINDS:
            self._reject(f"declares the kind {kind!r}", need=f"one of {', '.join(KINDS)}")
        allowed = STATE_AXES if kind == "reductions" else ("entries", "scalar")
        for key, axes in self.optimizer.state_axes(len(CHECK_SHAPE)).items():
            if axes not in allowed:
                self._reject(
                    f"declares axes {axes!r} of state {key!r}",
                    need=f"for {kind} one of {', '.join(allowed)}",
                )

    def _train(self, parts: Sequence[ParamEntries]) -> Tensor:
        """The parameter after the steps, updated in these parts."""
        boxes: list[Tensor] = []
        states: list[State] = []
        for part in parts:
            param = _entries_of(self.start, part).clone()
            boxes.append(param)
            states.append(self.optimizer.fresh_state(param, part.shape))
        for grad in self.grads:
            grads = [_entries_of(grad, part).clone() for part in parts]
            before = [each.clone() for each in grads]
            self._step(parts, boxes, grads, states)
            for given, kept in zip(grads, before, strict=True):
                if not torch.equal(given, kept):
                    self._reject("changes the gradient")
            for part, state in zip(parts, states, strict=True):
                self._check_state(part, state)
        flat = [each.flatten() for each in boxes]
        return torch.cat(flat)

    def _step(
        self,
        parts: Sequence[ParamEntries],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
    ) -> None:
        settings = {"lr": LR, "weight_decay": WEIGHT_DECAY}
        optimizer = self.optimizer
        if optimizer.kind == "elementwise":
            for index, param in enumerate(params):
                others = [each.clone() for each in params]
                grad = grads[index]
                state = states[index]
                optimizer.update_all([param], [grad], [state], **settings)
                self._check_others(params, others, index)
        elif optimizer.kind == "reductions":
            run_with_sums(
                optimizer, params, grads, states, entries=parts, add=_add_parts, **settings
            )
        else:
            self._step_matrix(params, grads, states, settings)

    def _step_matrix(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        settings: Mapping[str, float],
    ) -> None:
        directions = []
        for grad, state in zip(grads, states, strict=True):
            directions.append(self.optimizer.direction(grad, state).flatten())
        matrix = torch.cat(directions).view(CHECK_SHAPE)
        result = self.optimizer.transform(matrix.clone())
        if result.shape != matrix.shape:
            self._reject(
                "returns another shape from transform",
                got=str(list(result.shape)),
                need=str(list(matrix.shape)),
            )
        sizes = [param.numel() for param in params]
        for param, part in zip(params, result.flatten().split(sizes), strict=True):
            direction = part.view_as(param).to(param.dtype)
            self.optimizer.apply(param, direction, shape=CHECK_SHAPE, **settings)

    def _check_others(
        self, params: Sequence[Tensor], before: Sequence[Tensor], updated: int
    ) -> None:
        for index, (param, old) in enumerate(zip(params, before, strict=True)):
            if index != updated and not torch.equal(param, old):
                self._reject("changes a parameter that it was not called for")

    def _check_state(self, part: ParamEntries, state: State) -> None:
        declared = self.optimizer.state_axes(len(CHECK_SHAPE))
        for key in state:
            if key not in declared:
                self._reject(f"adds state {key!r} that it does not declare")
        for key, axes in declared.items():
            if key not in state:
                self._reject(f"removes state {key!r}")
            shape = _declared_shape(part, axes)
            if tuple(state[key].shape) != shape:
                self._reject(
                    f"state {key!r} has another shape than declared ({axes})",
                    got=str(list(state[key].shape)),
                    need=str(list(shape)),
                )

    def _reject(self, what: str, *, got: str = "", need: str = "") -> NoReturn:
        raise ConfigError(
            Fault(
                KEY,
                f"{self.name} violates the contract of an optimizer: it {what}",
                got=got,
                need=need,
                fix="see docs/optimizers.md",
            )
        )


def _part(start: int, stop: int) -> ParamEntries:
    """Entries `start` to `stop` of the parameter of the check, as a shard."""
    boxes = boxes_of_range(Box.whole(CHECK_SHAPE), start, stop)
    return ParamEntries(shape=CHECK_SHAPE, logical=(), axes=(), index=0, boxes_at=lambda _: boxes)


def _entries_of(x: Tensor, part: ParamEntries) -> Tensor:
    """A part's entries: all in their shape, or one-dimensional."""
    boxes = part.own_boxes
    if len(boxes) == 1 and boxes[0].shape == CHECK_SHAPE:
        return x
    entries = [x[box.slices].flatten() for box in boxes]
    return torch.cat(entries)


def _declared_shape(part: ParamEntries, axes: str) -> tuple[int, ...]:
    if axes == "scalar":
        return ()
    if axes == "entries":
        size = sum(box.size for box in part.own_boxes)
        is_whole = size == math.prod(CHECK_SHAPE)
        return CHECK_SHAPE if is_whole else (size,)
    return state_shape(CHECK_SHAPE, "rows" if axes == "rows" else "columns")


def _add_parts(sums: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The sums of all parts, for each part."""
    totals = []
    for first, *others in zip(*sums, strict=True):
        total = first.clone()
        for other in others:
            total += other
        totals.append(total)
    return [[total.clone() for total in totals] for _ in sums]


AddSums = Callable[[Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]]
"""From the partial sums of each parameter to the sums over all entries."""


def run_with_sums(
    optimizer: Optimizer,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    *,
    entries: Sequence[ParamEntries],
    add: AddSums,
    lr: float,
    weight_decay: float,
) -> None:
    """Update parameters by an optimizer of the kind `reductions`, all of them round by round."""
    updates = []
    for param, grad, state, own in zip(params, grads, states, entries, strict=True):
        update = optimizer.update_with_sums(
            param.view(-1), grad.reshape(-1), state, entries=own, lr=lr, weight_decay=weight_decay
        )
        updates.append(update)
    # Every generator stops at its sums; those of one round go through one all-reduce, then all go on.
    sums = [list(next(update)) for update in updates]
    while sums:
        totals = add(sums)
        sums = []
        for update, total in zip(updates, totals, strict=True):
            try:
                sums.append(list(update.send(total)))
            except StopIteration:
                continue
