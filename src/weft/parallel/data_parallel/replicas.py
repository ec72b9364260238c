"""`DataParallel`: one process, several devices, a replica of the module on each, run by one thread a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.parallel.autograd.tree import map_leaves, tensors_in
from weft.parallel.zero.wrapped_params import copied_state


class DataParallel(nn.Module):
    """Splits each input along `dim`, one part for a device, runs the module on all of them at once
    and joins the outputs.

        net = weft.DataParallel(net, ["cuda:0", "cuda:1"])
        net(x).mean().backward()        # gradients of all parts are summed onto the module's own parameters

    The module itself runs on the first device and has the parameters; the others get copies at
    every forward. Parts are as even as possible, the larger ones first; with fewer samples than
    devices the last devices are idle. Gradients are added in the order of the devices, so results
    do not depend on which thread was faster. Buffers that the forward writes keep what the first
    device wrote.

    Args:
        module: any module; its forward takes and returns tensors, or tuples, lists and dicts of
            them. Tensors among the arguments that have no dim `dim`, and everything else, go to
            every replica as they are.
        devices: of the replicas, the first one for the module itself; the same may be named more
            than once.
        dim: dimension of the samples in inputs and outputs. Outputs of no dimensions are stacked,
            one for each device.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[torch.device | str], dim: int = 0
    ) -> None:
        super().__init__()
        if not devices:
            raise PlanError(
                Fault(
                    "DataParallel",
                    "needs a device",
                    fix='devices=["cpu"], or the GPUs of this machine',
                )
            )
        self.devices = tuple(torch.device(device) for device in devices)
        self.dim = dim
        self.module = module.to(self.devices[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for all samples, on the first device."""
        inputs = _scatter((args, kwargs), self.devices, self.dim)
        devices = self.devices[: len(inputs)]
        replicas = _replicas(self.module, devices)
        calls: list[_ReplicaCall] = []
        for replica, own_input, device in zip(replicas, inputs, devices, strict=True):
            call = _ReplicaCall(replica, own_input, device)
            calls.append(call)
        first, *others = calls
        for call in others:
            call.start()
        # The first replica, the module itself, runs in this thread: what a forward keeps for
        # its thread is the script's.
        first.run()
        outputs = [call.result() for call in calls]
        return _gather(outputs, self.devices[0], self.dim)

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: gradients are complete when the backward returns. So that scripts may
        change strategy.
        """

    def full_state_dict(self) -> dict[str, Tensor]:
        """A copy of the module's state dict, which later steps do not change."""
        return copied_state(self.module)


class _ReplicaCall(threading.Thread):
    """One replica's forward in a thread, under the grad, inference and autocast modes of the thread
    that makes it.
    """

    def __init__(self, module: nn.Module, inputs: Any, device: torch.device) -> None:
        super().__init__(name=f"replica on {device}", daemon=True)
        self.module = module
        self.inputs = inputs
        self.device = device
        self.is_grad_enabled = torch.is_grad_enabled()
        self.is_inference = torch.is_inference_mode_enabled()
        self.autocast = torch.autocast(
            device.type,
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        args, kwargs = self.inputs
        is_cuda = self.device.type == "cuda"
        on_device = torch.cuda.device(self.device) if is_cuda else nullcontext()
        inference = torch.inference_mode(self.is_inference)
        try:
            with on_device, inference, torch.set_grad_enabled(self.is_grad_enabled), self.autocast:
                self._result = self.module(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error

    def result(self) -> Any:
        """What the replica returned."""
        has_thread = self.ident is not None
        if has_thread:
            self.join()
        if self._error is not None:
            self._error.add_note(f"raised by the replica on {self.device}")
            raise self._error
        return self._result


class _CopyToDevices(torch.autograd.Function):
    """Parameters -> their copies on other devices, device after device; gradients are added in that
    order.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no replica uses has no gradient
        ctx.param_devices = [param.device for param in params]
        copies: list[Tensor] = []
        for device in devices:
            for param in params:
                # A copy also on the same device: each replica's gradient must arrive by an output of its own.
                copied = param.to(device, copy=True)
                copies.append(copied)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        num_params = len(ctx.param_devices)
        sums: list[Tensor | None] = [None] * num_params
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            index = number % num_params
            total = sums[index]
            moved = gradient.to(ctx.param_devices[index])
            # Not in place: `moved` may be the tensor that autograd has handed in.
            sums[index] = moved if total is None else total + moved
        return None, *sums


def _replicas(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """The module itself, and one replica for each further device."""
    other_devices = devices[1:]
    params = [param for param in module.parameters() if param.requires_grad]
    num_params = len(params)
    copies: Sequence[Tensor] = ()
    if other_devices and params and torch.is_grad_enabled():
        copies = _CopyToDevices.apply(other_devices, *params)  # type: ignore[no-untyped-call]
    replicas = [module]
    for number, device in enumerate(other_devices):
        maker = _ReplicaMaker(device)
        if copies:
            first = number * num_params
            own_copies = copies[first : first + num_params]
            for param, param_copy in zip(params, own_copies, strict=True):
                maker.copies[id(param)] = param_copy
        replica = maker.replicate(module)
        replicas.append(replica)
    return replicas


@dataclass
class _ReplicaMaker:
    """Makes modules of the same types whose tensors are on `device`.

    Attributes:
        copies: id of a parameter -> its copy on the device.
        replicas: id of a module -> its replica, so that a module used twice is replicated once.
    """

    device: torch.device
    copies: dict[int, Tensor] = field(default_factory=dict)
    replicas: dict[int, nn.Module] = field(default_factory=dict)

    def replicate(self, module: nn.Module) -> nn.Module:
        """The replica of `module` and of all modules below it."""
        key = id(module)
        if key in self.replicas:
            return self.replicas[key]
        replica: nn.Module = module._replicate_for_data_parallel()
        self.replicas[key] = replica
        for name, param in module._parameters.items():
            copied = None if param is None else self._copy_of(param)
            # A plain attribute: the copy is a result of `_CopyToDevices`, and a parameter would end its graph.
            setattr(replica, name, copied)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffer = buffer.to(self.device, copy=True)
            replica._buffers[name] = buffer
        for name, child in module._modules.items():
            if child is not None:
                child = self.replicate(child)
            replica._modules[name] = child
        return replica

    def _copy_of(self, param: Tensor) -> Tensor:
        key = id(param)
        if key not in self.copies:
            values = param.detach()
            self.copies[key] = values.to(self.device)
        return self.copies[key]


def _scatter(inputs: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """The arguments of each replica; no more of them than there are samples.

    Raises:
        PlanError: tensors differ in their number of samples.
    """
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim() > dim]
    lengths = {tensor.shape[dim] for tensor in tensors}
    if len(lengths) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(inputs))
        raise PlanError(
            Fault(
                "DataParallel", f"inputs differ in their number of samples, dim {dim}", got=shapes
            )
        )
    num_parts = max(1, min(len(devices), *lengths)) if lengths else 1
    parts = []
    for number in range(num_parts):
        part = _part(inputs, number, num_parts=num_parts, device=devices[number], dim=dim)
        parts.append(part)
    return parts


def _part(inputs: Any, number: int, *, num_parts: int, device: torch.device, dim: int) -> Any:
    """Part `number` of the arguments, on its device."""

    def split(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim:
            return tensor.to(device)
        parts = tensor.tensor_split(num_parts, dim)
        return parts[number].to(device)

    return map_leaves(inputs, Tensor, split)


def _gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Outputs of the replicas as one: tensors joined, other values of the first replica."""
    tensors_of_replica = [iter(list(tensors_in(output))) for output in outputs]

    def join(_: Tensor) -> Tensor:
        parts = [next(tensors).to(device) for tensors in tensors_of_replica]
        if parts[0].dim() == 0:
            return torch.stack(parts)
        return torch.cat(parts, dim)

    return map_leaves(outputs[0], Tensor, join)
