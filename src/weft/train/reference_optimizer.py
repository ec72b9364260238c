"""`reference_optimizer`: torch's own optimizers on the whole parameters of one device, as a reference of every layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.config.optimizers import AdafactorOptions, MuonOptions, options_of
from weft.config.schema import OptimConfig
from weft.parallel.zero.param_entries import ParamEntries
from weft.train.optim import LogicalAxes, NamedOptimizer
from weft.train.optimizers.groups import GroupSettings, group_names, splits_stacked


@dataclass(frozen=True)
class _MatrixView:
    """A matrix of a parameter as a parameter of its own, in the same memory."""

    tensor: Tensor
    param: Tensor
    index: tuple[Any, ...]

    def set_grad(self) -> None:
        """Its gradient is the same part of the parameter's."""
        grad = self.param.grad
        self.tensor.grad = None if grad is None else grad[self.index]


class ReferenceOptimizer:
    """Several torch optimizers as one, with the groups of a run.

    Attributes:
        param_groups: set "lr" in each; the factor of its group is applied in `step`.
    """

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._views: list[_MatrixView] = []

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        settings: GroupSettings,
    ) -> None:
        """Step this optimizer too."""
        self._optimizers.append(optimizer)
        self.param_groups.append({"lr": 0.0, "lr_scale": settings.lr_scale})

    def views(
        self,
        param: Tensor,
        entries: ParamEntries,
        *,
        splits: bool,
    ) -> list[Tensor]:
        """The logical matrices of a parameter."""
        found = []
        for box in entries.matrices(splits_stacked=splits):
            index: tuple[Any, ...] = box.slices
            if len(box.lo) == 3:
                index = (box.lo[0], *box.slices[1:])
            view = _MatrixView(
                tensor=param.detach()[index],
                param=param,
                index=index,
            )
            self._views.append(view)
            found.append(view.tensor)
        return found

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for view in self._views:
            view.set_grad()
        for optimizer, values in zip(self._optimizers, self.param_groups, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = values["lr"] * values["lr_scale"]
            optimizer.step()


def reference_optimizer(
    settings: OptimConfig,
    named_parameters: Mapping[str, Tensor],
    *,
    decay_names: Collection[str] | None = None,
    logical_axes: LogicalAxes | None = None,
) -> ReferenceOptimizer:
    """torch's optimizers for `settings`: AdamW, SGD, Muon, Adafactor; `_TorchLion` and a user's class
    (which torch does not have) on whole parameters.

    Args:
        settings: the section `optim` of a run.
        named_parameters: whole parameters by global name; their `.grad` is read at `step()`.
        decay_names: those with weight decay where no group says otherwise; default: the matrices.
        logical_axes: of each parameter; needed where a dim is `Stacked`.
    """
    shapes = {name: tuple(param.shape) for name, param in named_parameters.items()}
    if decay_names is None:
        decay_names = [name for name, shape in shapes.items() if len(shape) >= 2]
    reference = ReferenceOptimizer()
    for group, names in group_names(settings, shapes, decay_names=decay_names).items():
        params: list[Tensor] = []
        for name in names:
            param = named_parameters[name]
            axes = (logical_axes or {}).get(name, ())
            if group.optimizer == "muon":
                entries = ParamEntries.whole(shapes[name], axes)
                params += reference.views(param, entries, splits=splits_stacked(settings))
            else:
                params.append(param)
        reference.add(_torch_optimizer(settings, group, params), group)
    return reference


def _torch_optimizer(
    settings: OptimConfig,
    group: GroupSettings,
    params: list[Tensor],
) -> torch.optim.Optimizer:
    decay = group.weight_decay
    if group.optimizer == "adamw":
        return torch.optim.AdamW(
            params,
            betas=group.betas,
            eps=settings.eps,
            weight_decay=decay,
        )
    if group.optimizer == "sgd":
        return torch.optim.SGD(
            params,
            momentum=settings.momentum,
            weight_decay=decay,
        )
    if group.optimizer == "lion":
        return _TorchLion(params, betas=group.betas, weight_decay=decay)
    if group.optimizer == "muon":
        return _torch_muon(options_of(settings, "muon"), params, decay)
    if group.optimizer == "adafactor":
        options = options_of(settings, "adafactor")
        assert isinstance(options, AdafactorOptions), "its own"
        eps = (options.eps[0] or None, options.eps[1])
        return torch.optim.Adafactor(
            params,
            beta2_decay=options.beta2_decay,
            eps=eps,
            d=options.d,
            weight_decay=decay,
        )
    return _UserClass(settings, group, params)


def _torch_muon(
    options: Any,
    params: list[Tensor],
    decay: float,
) -> torch.optim.Optimizer:
    assert isinstance(options, MuonOptions), "its own"
    return torch.optim.Muon(
        params,
        weight_decay=decay,
        momentum=options.momentum,
        nesterov=options.nesterov,
        ns_coefficients=options.ns_coefficients,
        ns_steps=options.ns_steps,
        eps=options.eps,
        adjust_lr_fn=options.adjust_lr_fn,
    )


class _TorchLion(torch.optim.Optimizer):
    """Lion as algorithm 2 of Chen et al. 2023 writes it."""

    def __init__(
        self,
        params: list[Tensor],
        *,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            lr = group["lr"]
            decay = group["weight_decay"]
            for theta in group["params"]:
                g = theta.grad
                if g is None:
                    continue
                m = self.state[theta].setdefault("m", torch.zeros_like(theta))
                c = beta1 * m + (1 - beta1) * g
                direction = c.sign() + decay * theta
                theta.copy_(theta - lr * direction)
                m.copy_(beta2 * m + (1 - beta2) * g)


class _UserClass(torch.optim.Optimizer):
    """A user's class on whole parameters."""

    def __init__(
        self,
        settings: OptimConfig,
        group: GroupSettings,
        params: list[Tensor],
    ) -> None:
        super().__init__(params, {"lr": 0.0})
        named = {str(number): param for number, param in enumerate(params)}
        plain = settings.model_copy(
            update={"name": group.optimizer, "groups": (), "weight_decay": group.weight_decay}
        )
        self._inner = NamedOptimizer(named, plain, decay_names=named)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._inner.step()
