"""Buffers that training forwards update: `update_buffers`, the records of a step, BatchNorm by records.

Note [Buffer updates]
    A forward that changes a buffer would change it by the samples of its own rank. So it hands values
    of its micro-batch to `update_buffers`, and its module has a method of that name, which changes
    the buffers by these values:

        class Centred(nn.Module):
            def forward(self, x):
                weft.update_buffers(self, x.mean(0))
                return x - self.mean

            def update_buffers(self, mean):
                self.mean.lerp_(mean, 0.1)

    In a training step of weft the values are kept by micro-batch. At its end the data ranks gather
    them, and every rank calls the method for all micro-batches in the order of the samples, so that
    buffers have the same bits on all data ranks. Until then a forward reads the values that the
    buffers had before the step. BatchNorm of torch is the first user: in training it reads no running
    statistics, so they are those of one device that goes through the micro-batches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.models.common.init import path_below

METHOD = "update_buffers"
Calls = list[tuple[Tensor, ...]]
"""The values of each call of one module in one micro-batch."""
RECORDS = "buffer_records"
"""Attribute of a module that is bound to records."""
GROUP = "statistics_group"
"""Attribute of a BatchNorm whose statistics are of more than its own micro-batch."""


class NormalisesTogether(Protocol):
    """Normalises several micro-batches together.

    Attributes:
        size: how many, with consecutive samples.
    """

    @property
    def size(self) -> int: ...

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x normalised, and mean and unbiased variance [2, C] of them all."""


def update_buffers(module: nn.Module, *values: Tensor) -> None:
    """Let `module.update_buffers(*values)` change the buffers of a module, in its training forward.

    In a training step of weft it is called at the end of the step, for every micro-batch in the order
    of the samples; elsewhere at once. The values are detached; those of all micro-batches have the
    same shapes. See docs/your-model.md.
    """
    # cloned: the forward may go on to change them, and the update comes at the end of the step
    _hand_over(module, tuple(value.detach().clone() for value in values))


def _hand_over(module: nn.Module, values: tuple[Tensor, ...]) -> None:
    """Record values that nothing changes any more, or call the method with them; not on the meta
    device, where there are none.
    """
    records: BufferRecords | None = vars(module).get(RECORDS)
    if records is not None:
        records.add(module, values)
    elif module.training and not any(value.is_meta for value in values):
        apply_update(module, values)


@torch.no_grad()
def apply_update(module: nn.Module, values: tuple[Tensor, ...]) -> None:
    """Call the method of a module that changes its buffers."""
    method: Any = getattr(module, METHOD)
    method(*values)


class BufferRecords:
    """Values that the training forwards of a step have recorded, on one rank.

    Args:
        modules: those whose buffers are updated, by name.

    Attributes:
        values: name -> micro-batch -> the values of each call.
        microbatch: whose forward runs; None: nothing is recorded, because a forward is recomputed, or
            no training step runs.
    """

    def __init__(self, modules: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        self.modules = dict(modules)
        self.values: dict[str, dict[int, Calls]] = {}
        self.microbatch: int | None = None
        self._names = {id(module): name for name, module in modules.items()}
        for module in modules.values():
            vars(module)[RECORDS] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferRecords:
        """A copied module records nothing."""
        return BufferRecords()

    def add(self, module: nn.Module, values: tuple[Tensor, ...]) -> None:
        """Keep the values of one call."""
        name = self._names.get(id(module))
        # a forward that is repeated for a backward has recorded its values the first time
        if name is None or self.microbatch is None or not module.training:
            return
        of_module = self.values.setdefault(name, {})
        of_module.setdefault(self.microbatch, []).append(values)

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """While active, the forward of this micro-batch runs."""
        self.microbatch = microbatch
        try:
            yield
        finally:
            self.microbatch = None

    def take(self) -> dict[str, dict[int, Calls]]:
        """The values of the step, which are kept no longer."""
        # a new mapping: what was taken may be kept while the next step records
        taken, self.values = self.values, {}
        return taken

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the modules, by name."""
        return {
            path_below(name, key): buffer
            for name, module in self.modules.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }


class RecordingBatchNorm(_BatchNorm):
    """A BatchNorm whose training forward records the statistics of its micro-batch, or group of them.

    The base class behind torch's BatchNorm in the classes that `record_batch_norm` makes: it takes the
    place of torch's own forward, also where the forward of a subclass calls that. It computes in the
    type of its input, 16 bits in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x[N, C, ...] normalised for each channel."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        running_mean, running_var = self.running_mean, self.running_var
        assert running_mean is not None, "a BatchNorm that tracks its statistics"
        assert running_var is not None, "a BatchNorm that tracks its statistics"
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        if not self.training:
            mean, variance = running_mean.to(wide), running_var.to(wide)
            return F.batch_norm(x, mean, variance, weight, bias, eps=self.eps)
        group: NormalisesTogether | None = vars(self).get(GROUP)
        if group is not None:
            out, statistics = group(x, weight, bias, self.eps)
            _hand_over(self, (statistics,))
            return out
        # With momentum 1 the kernel writes the statistics themselves, the variance unbiased.
        statistics = running_mean.new_zeros((2, len(running_mean)), dtype=wide)
        mean, variance = statistics.unbind()
        out = F.batch_norm(
            x, mean, variance, weight, bias, training=True, momentum=1.0, eps=self.eps
        )
        _hand_over(self, (statistics,))
        return out

    def update_buffers(self, statistics: Tensor) -> None:
        """Update the running values by mean and unbiased variance [2, C]."""
        update_running_values(self, statistics)


@torch.no_grad()
def update_running_values(norm: _BatchNorm, statistics: Tensor) -> None:
    """The formula of torch's BatchNorm, by mean and unbiased variance [2, C]; without a momentum the
    mean of all micro-batches.
    """
    assert norm.running_mean is not None, "a BatchNorm that tracks its statistics"
    assert norm.running_var is not None, "a BatchNorm that tracks its statistics"
    mean, variance = statistics.to(norm.running_mean.dtype).unbind()
    share: float | Tensor = norm.momentum or 0.0
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            share = norm.num_batches_tracked.to(mean.dtype).reciprocal()
    norm.running_mean.lerp_(mean, share)
    norm.running_var.lerp_(variance, share)


@lru_cache(maxsize=256)
def _recording_class(cls: type[_BatchNorm]) -> type[_BatchNorm]:
    """The class with torch's own forward replaced, and otherwise what it is."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases: tuple[type, ...] = (cls, RecordingBatchNorm)
    if cls.forward is nn.SyncBatchNorm.forward:  # which calls torch.distributed
        bases = (RecordingBatchNorm, cls)
    return type(cls.__name__, bases, names)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm that tracks statistics."""
    return isinstance(module, _BatchNorm) and module.track_running_stats


def record_batch_norm(block: nn.Module) -> None:
    """Let every BatchNorm of a block record its statistics in place of updating its buffers."""
    for module in block.modules():
        if is_batch_norm(module) and not isinstance(module, RecordingBatchNorm):
            cls: Any = type(module)
            # in place: hooks, parameters and references of others stay
            module.__class__ = _recording_class(cls)


def num_together(module: nn.Module) -> int:
    """How many micro-batches a module normalises together."""
    group: NormalisesTogether | None = vars(module).get(GROUP)
    return 1 if group is None else group.size


class _PartOfGroup:
    """Stands for what normalises parts together, where these have no values: one sample is enough."""

    size = 1

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `NormalisesTogether`."""
        statistics = x.new_zeros((2, x.shape[1]))
        mean, variance = statistics.unbind()
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps), statistics


def take_parts(blocks: Mapping[str, nn.Module]) -> None:
    """Let BatchNorm of blocks on the meta device take parts of what is normalised together."""
    for block in blocks.values():
        record_batch_norm(block)
        for module in filter(is_batch_norm, block.modules()):
            vars(module)[GROUP] = _PartOfGroup()


def updating_modules(block: nn.Module, name: str) -> dict[str, nn.Module]:
    """The modules of a block whose training forward updates buffers, by name."""
    return {
        path_below(name, path): module
        for path, module in block.named_modules()
        if is_batch_norm(module) or callable(getattr(type(module), METHOD, None))
    }


def updates_buffers(blocks: Mapping[str, nn.Module]) -> bool:
    """Whether training updates buffers, by values of micro-batches: they are then units, which no
    comparison divides.
    """
    return any(updating_modules(block, name) for name, block in blocks.items())


@contextmanager
def evaluating(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """While active, modules that update buffers are in evaluation mode, and read them."""
    changed = [
        module
        for name, block in blocks.items()
        for module in updating_modules(block, name).values()
        if module.training
    ]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


class _NotedUpdates(BufferRecords):
    """Calls a function with the values of each call, and keeps none."""

    def __init__(self, note: Callable[[tuple[Tensor, ...]], None]) -> None:
        super().__init__()
        self._note = note

    def add(self, module: nn.Module, values: tuple[Tensor, ...]) -> None:
        """Note the values of one call."""
        self._note(values)


@contextmanager
def noted_updates(block: nn.Module, note: Callable[[tuple[Tensor, ...]], None]) -> Iterator[None]:
    """While active, the block updates no buffers: `note` gets the values of each call of `update_buffers`."""
    modules = updating_modules(block, "").values()
    before = [vars(module).get(RECORDS) for module in modules]
    for module in modules:
        vars(module)[RECORDS] = _NotedUpdates(note)
    try:
        yield
    finally:
        for module, records in zip(modules, before, strict=True):
            vars(module)[RECORDS] = records


@contextmanager
def ignoring_updates(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """While active, forwards of these blocks update no buffers, nor do copies that are made of them."""
    modules: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        record_batch_norm(block)
        modules.update(updating_modules(block, name))
    BufferRecords(modules)
    try:
        yield
    finally:
        for module in modules.values():
            del vars(module)[RECORDS]
