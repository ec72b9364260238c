"""Buffers that training updates, on one device: torch's own BatchNorm, and other updates at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.models.common.buffer_updates import METHOD, RECORDS
from weft.models.common.init import path_below


def prepare_plain(
    blocks: Mapping[str, nn.Module],
    compute: torch.dtype,
    deferred: Deferred | None = None,
    *,
    params: torch.dtype | None = None,
) -> dict[str, nn.Module]:
    """The modules of these plain blocks that update buffers in training, by name.

    Args:
        deferred: takes the calls of `update_buffers`; None: nothing takes them.
        params: dtype of parameters, by which buffers are stored; None: as `compute`.
    """
    # torch's own BatchNorm takes no statistics of another type on a CPU
    has_other_type = compute != _stored_type(params or compute)
    found: dict[str, nn.Module] = {}
    for block_name, block in blocks.items():
        for path, module in block.named_modules():
            is_norm = isinstance(module, _BatchNorm) and module.running_mean is not None
            if is_norm and has_other_type:
                vars(module)["forward"] = partial(_by_definition, module)
            elif isinstance(module, nn.SyncBatchNorm):  # here one device has all samples
                vars(module)["forward"] = partial(_BatchNorm.forward, module)
            if is_norm or callable(getattr(type(module), METHOD, None)):
                found[path_below(block_name, path)] = module
                vars(module)[RECORDS] = deferred or Deferred()
    return found


def _stored_type(dtype: torch.dtype) -> torch.dtype:
    """Of buffers that training updates: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Deferred:
    """The calls of `update_buffers` of a step, in the order of the samples."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, tuple[Tensor, ...]]] = []

    def add(self, module: nn.Module, values: tuple[Tensor, ...]) -> None:
        """Take a call of a training forward."""
        if module.training and torch.is_grad_enabled():
            self.calls.append((module, values))


class PlainBuffers:
    """The buffers that training updates, of the one-device reference; the others get the dtype of compute.

    A forward of torch's BatchNorm updates them at once, and one that is repeated, or whose step is
    skipped, is undone.

    Args:
        dtype: of parameters; buffers that training updates have at least float32.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], *, compute: torch.dtype, dtype: torch.dtype
    ) -> None:
        self._deferred = Deferred()
        self._modules = prepare_plain(blocks, compute, self._deferred, params=dtype)
        self._trained = [module for module in self._modules.values() if module.training]
        updated = _stored_type(dtype)
        updating = {id(module) for module in self._modules.values()}
        for module in nn.ModuleDict(blocks).modules():
            own = updated if id(module) in updating else compute
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[key] = buffer.to(own)
        self._before = self._copies()

    def __bool__(self) -> bool:
        return bool(self._modules)

    @property
    def values(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return {
            path_below(name, key): buffer
            for name, module in self._modules.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.values.items()}

    @torch.no_grad()
    def undo(self) -> None:
        """Give the buffers the values that they had before the step."""
        self._deferred.calls.clear()
        for name, buffer in self.values.items():
            buffer.copy_(self._before[name])

    @torch.no_grad()
    def finish_step(self) -> None:
        """Make the updates that wait for the end of a step."""
        for module, values in self._deferred.calls:
            getattr(module, METHOD)(*values)
        self._deferred.calls.clear()
        self._before = self._copies()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While active, the modules that were built for training are in evaluation mode."""
        for module in self._trained:
            module.train(False)
        yield
        for module in self._trained:
            module.train()


def _by_definition(module: _BatchNorm, x: Tensor) -> Tensor:
    """The definition of BatchNorm, computed in the type of x, 16 bits in float32."""
    assert module.running_mean is not None, "a BatchNorm that tracks its statistics"
    assert module.running_var is not None, "a BatchNorm that tracks its statistics"
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, variance = module.running_mean.to(wide.dtype), module.running_var.to(wide.dtype)
    if module.training:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean, variance = wide.mean(dims), wide.var(dims, correction=0)
        _track(module, mean.detach(), wide.detach().var(dims, correction=1))
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = (wide - mean.view(shape)) * (variance + module.eps).rsqrt().view(shape)
    if module.affine:
        weight, bias = module.weight.to(wide.dtype), module.bias.to(wide.dtype)
        out = out * weight.view(shape) + bias.view(shape)
    return out.to(x.dtype)


def _track(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """The update of the running statistics, as torch's documentation defines it."""
    assert module.running_mean is not None, "a BatchNorm that tracks its statistics"
    assert module.running_var is not None, "a BatchNorm that tracks its statistics"
    assert module.num_batches_tracked is not None, "a BatchNorm that counts its batches"
    module.num_batches_tracked += 1
    share = module.momentum
    if share is None:
        share = 1 / int(module.num_batches_tracked)
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        running.copy_((1 - share) * running + share * value)
