"""Owns `DataParallel`: one process, several devices, a replica of the module on each, played by threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.parallel.model.tree import map_leaves, tensors_in


class DataParallel(nn.Module):
    """Cuts each input along `dim`, one part for a device, runs the module on all of them at once and joins the outputs.

        net = weft.DataParallel(net, ["cuda:0", "cuda:1"])
        net(x).mean().backward()        # gradients of all parts are summed onto the module's own parameters

    The module itself runs on the first device and has the parameters; the others get copies at every forward. Parts are as
    even as they can be, the larger ones first; with fewer samples than devices the last devices rest. Gradients are added in
    the order of the devices, so results do not depend on which thread was faster. Buffers that the forward writes keep what
    the first device wrote.

    Args:
        module: any module; its forward takes and returns tensors, or tuples, lists and dicts of them. Tensors among the
            arguments that have no dim `dim`, and everything else, go to every replica as they are.
        devices: where replicas live, the first one for the module itself; the same may be named more than once.
        dim: dimension of the samples in inputs and outputs. Outputs of no dimensions are stacked, one for each device.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device | str], dim: int = 0) -> None:
        super().__init__()
        if not devices:
            raise PlanError(Fault("DataParallel", "needs a device", fix='devices=["cpu"], or the GPUs that there are'))
        self.devices, self.dim = tuple(map(torch.device, devices)), dim
        self.module = module.to(self.devices[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for all samples, on the first device."""
        parts = _scatter((args, kwargs), self.devices, self.dim)
        replicas = _replicas(self.module, self.devices[: len(parts)])
        calls = [_Call(*each) for each in zip(replicas, parts, self.devices[: len(parts)], strict=True)]
        for call in calls[1:]:
            call.start()
        calls[0].run()
        return _gather([call.result() for call in calls], self.devices[0], self.dim)

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do: gradients are whole when the backward returns. Here so that scripts may change strategy."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state dict."""
        return self.module.state_dict()


class _Call(threading.Thread):
    """One replica's forward, in a thread of its own, under the modes of the thread that makes it."""

    def __init__(self, module: nn.Module, given: Any, device: torch.device) -> None:
        super().__init__(name=f"replica on {device}", daemon=True)
        self.module, self.given, self.device, kind = module, given, device, device.type
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        args, kwargs = self.given
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        try:
            with on_device, torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self.autocast:
                self._result = self.module(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked for it
            self._error = error

    def result(self) -> Any:
        """What the replica returned."""
        if self.ident is not None:
            self.join()
        if self._error is not None:
            self._error.add_note(f"raised by the replica on {self.device}")
            raise self._error
        return self._result


class _Copies(torch.autograd.Function):
    """Parameters -> what stands for them on other devices; gradients are added up in the order of the devices."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.homes = [param.device for param in params]
        return tuple(param.to(device, copy=True) for device in devices for param in params)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None] * len(ctx.homes)
        for number, gradient in enumerate(gradients):
            place = number % len(sums)
            if gradient is not None:
                known, here = sums[place], gradient.to(ctx.homes[place])
                sums[place] = here if known is None else known + here
        return None, *sums


def _replicas(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """The module itself, and one replica for each further device."""
    params = [param for param in module.parameters() if param.requires_grad]
    copies: Sequence[Tensor] = ()
    if devices[1:] and params and torch.is_grad_enabled():
        copies = _Copies.apply(devices[1:], *params)  # type: ignore[no-untyped-call]
    replicas = [module]
    for number, device in enumerate(devices[1:]):
        own = copies[number * len(params) : (number + 1) * len(params)]
        stand_ins = {id(param): stand_in for param, stand_in in zip(params, own, strict=False)}
        replicas.append(_replica(module, device, stand_ins, {}))
    return replicas


def _replica(
    module: nn.Module, device: torch.device, stand_ins: dict[int, Tensor], known: dict[int, nn.Module]
) -> nn.Module:
    """A module of the same type whose tensors are on `device`; `known` are those that were made already, by the original."""
    if id(module) in known:
        return known[id(module)]
    replica: nn.Module = module._replicate_for_data_parallel()
    known[id(module)] = replica
    for name, param in module._parameters.items():
        if param is not None and id(param) not in stand_ins:
            stand_ins[id(param)] = param.detach().to(device)
        setattr(replica, name, None if param is None else stand_ins[id(param)])
    for name, buffer in module._buffers.items():
        replica._buffers[name] = None if buffer is None else buffer.to(device, copy=True)
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, device, stand_ins, known)
    return replica


def _scatter(given: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """The arguments of each replica; no more of them than there are samples."""
    lengths = {x.shape[dim] for x in tensors_in(given) if x.dim() > dim}
    if len(lengths) > 1:
        told = ", ".join(str(list(x.shape)) for x in tensors_in(given))
        raise PlanError(Fault("DataParallel", f"inputs differ in their number of samples, dim {dim}", got=told))
    num_parts = max(1, min(len(devices), *lengths)) if lengths else 1

    def part(number: int) -> Any:
        def cut(x: Tensor) -> Tensor:
            own = x.tensor_split(num_parts, dim)[number] if x.dim() > dim else x
            return own.to(devices[number])

        return map_leaves(given, Tensor, cut)

    return [part(number) for number in range(num_parts)]


def _gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Outputs of the replicas as one: tensors joined, other values of the first replica."""
    columns = [iter(list(tensors_in(output))) for output in outputs]

    def join(_: Tensor) -> Tensor:
        parts = [next(column).to(device) for column in columns]
        return torch.stack(parts) if parts[0].dim() == 0 else torch.cat(parts, dim)

    return map_leaves(outputs[0], Tensor, join)
