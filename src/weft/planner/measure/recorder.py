"""Recording of a training step as regions (actions, phases): live bytes, kernels and collectives of each.

The same recorder runs over a step on the meta device, which computes nothing, and over a real one.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.observe import Operation
from weft.planner.measure.host_values import value_on_host
from weft.planner.measure.kernels import KernelLaunch, aten, kernel_of
from weft.planner.measure.meta_results import MetaResults

Parts = Mapping[str, int]
"""Bytes by what they hold."""


REDUCTIONS = ("reduce_scatter",)
"""Operations that sum gradients."""


class Started(NamedTuple):
    """A collective or message begins."""

    op: Operation


class Ended(NamedTuple):
    """A rank has waited for a collective or message."""

    op: Operation


Event = KernelLaunch | Started | Ended


@dataclass
class BlockSegment:
    """The part of a region during which one block was computing.

    Attributes:
        block: its name; "" outside of blocks.
        first_event: place of its first event among those of the region.
        entry_bytes: live at its begin.
        peak_bytes, peak_parts: as of the region.
    """

    block: str
    first_event: int
    entry_bytes: int
    peak_bytes: int
    peak_parts: Parts = field(default_factory=dict)


@dataclass
class RecordedRegion:
    """What happened between two marks.

    Attributes:
        name: of the action (`F2.0`) or phase.
        entry_bytes, exit_bytes: live at its begin and end, without what lived before the recording.
        peak_bytes: most that lived at once.
        peak_block: block that was computing then; "" outside of blocks.
        peak_parts: bytes of known buffers at that time, by what they hold.
        events: kernels, and starts and ends of collectives and messages, in order. An operation
            ends when the rank has waited for it, perhaps in a later region.
        segments: its parts by block, in order.
        host_change: bytes of activations on the host after it that were not there before.
        host_copied: bytes that were copied to the host.
        entry_under_way, exit_under_way: bytes of reductions that were under way at its begin and
            end.
    """

    name: str
    entry_bytes: int
    exit_bytes: int = 0
    peak_bytes: int = 0
    peak_block: str = ""
    peak_parts: Parts = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    segments: list[BlockSegment] = field(default_factory=list)
    entry_under_way: int = 0
    exit_under_way: int = 0
    host_change: int = 0
    host_copied: int = 0

    @property
    def kernels(self) -> Counter[KernelLaunch]:
        """How often each kernel was launched."""
        return Counter(event for event in self.events if isinstance(event, KernelLaunch))

    @property
    def operations(self) -> list[Operation]:
        """Collectives and messages that were started."""
        return [event.op for event in self.events if isinstance(event, Started)]

    @property
    def starts_reductions(self) -> bool:
        """Whether a reduction of gradients to shards was started."""
        return any(op.op in REDUCTIONS for op in self.operations)

    @property
    def change(self) -> int:
        """Bytes that live after it and did not before."""
        return self.exit_bytes - self.entry_bytes

    @property
    def workspace(self) -> int:
        """Most bytes that lived within it above those at its begin."""
        return self.peak_bytes - self.entry_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(event.flops for event in self.events if isinstance(event, KernelLaunch))


def storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The distinct storages of these tensors, by address."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of these tensors."""
    return sum(storage.nbytes() for storage in storages(tensors).values())


class StepRecorder(TorchDispatchMode):
    """Observer of the operations and collectives of one rank's thread.

    Args:
        device: tensors elsewhere are not counted.
        parts: bytes of known buffers, by what they hold, at the time of the call.

    Attributes:
        regions: in order.
        block: that is computing, "" if none.
        resized_bytes: bytes, at the time of the call, of kept tensors whose storage is freed and
            allocated in place.
        under_way_bytes: of reductions, at the time of the call.
        offloaded: bytes on the host, and bytes copied to it so far, at the time of the call.
    """

    def __init__(self, device: torch.device, *, parts: Callable[[], Parts] = dict) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.regions: list[RecordedRegion] = []
        self.block = ""
        self._parts = parts
        self.resized_bytes: Callable[[], int] = lambda: 0
        self.under_way_bytes: Callable[[], int] = lambda: 0
        self.offloaded: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._host_entry = (0, 0)
        self._kept: dict[int, UntypedStorage] = {}
        self._live: set[int] = set()
        self._live_bytes = 0
        self._region = RecordedRegion("", 0)
        self._results = MetaResults()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors: they live from step to step."""
        self._kept = storages(tensors)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch otherwise wraps every call, for `torch.compile`, which a recording does not use."""
        return False

    @property
    def live_bytes(self) -> int:
        """Bytes that live now and did not before the recording."""
        return self._live_bytes + self.resized_bytes()

    def begin(self, name: str) -> None:
        """End the region, if there is one, and begin another."""
        self.end()
        level = self.live_bytes
        self._region = RecordedRegion(name, level, peak_bytes=level)
        self._region.entry_under_way = self.under_way_bytes()
        self._host_entry = self.offloaded()
        self._begin_segment()

    def _begin_segment(self) -> None:
        level = self.live_bytes
        region = self._region
        segment = BlockSegment(self.block, len(region.events), level, peak_bytes=level)
        region.segments.append(segment)

    def end(self) -> None:
        """End the region."""
        if self._region.name:
            self._region.exit_bytes = self.live_bytes
            self._region.exit_under_way = self.under_way_bytes()
            held, copied = self.offloaded()
            self._region.host_change = held - self._host_entry[0]
            self._region.host_copied = copied - self._host_entry[1]
            self.regions.append(self._region)
        self._region = RecordedRegion("", 0)

    def rename(self, name: str) -> None:
        """Name the region that is recorded."""
        self._region.name = name

    def on_block(self, name: str) -> None:
        """Note the block that computes from now on."""
        if name == self.block:
            return
        self.block = name
        self._begin_segment()

    def started(self, op: Operation) -> None:
        """Note a collective or message."""
        self._region.events.append(Started(op))
        self._update_peak()

    def finished(self, op: Operation) -> None:
        """Note that the rank has waited for it."""
        self._region.events.append(Ended(op))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_host = value_on_host(func, args, kwargs)
        if on_host is not None:
            return on_host
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` on the device, and note its kernel and the memory of its results."""
        key = self._result_key(func, args, kwargs)
        known = self._results.find(key)
        if known is not None:
            kernel = known.kernel
            result = known.make()
            outputs = self._own_tensors(result)
        else:
            result = func(*args, **kwargs)
            inputs = self._own_tensors((args, kwargs))
            outputs = self._own_tensors(result)
            kernel = kernel_of(func, inputs, outputs, args)
            self._results.note(key, inputs=inputs, result=result, kernel=kernel)
        if kernel is not None:
            self._region.events.append(kernel)
        for tensor in outputs:
            self._note(tensor.untyped_storage())
        self._update_peak()
        return result

    def _result_key(self, func: Any, args: Any, kwargs: Any) -> Hashable | None:
        """What the result of a call depends on; None on real devices, which compute."""
        if self.device.type != "meta":
            return None
        return self._results.key(func, args, kwargs)

    def _own_tensors(self, tree: object) -> list[Tensor]:
        found: list[Tensor] = []
        self._collect(tree, found)
        return found

    def _collect(self, tree: object, found: list[Tensor]) -> None:
        """Add the tensors of this device in arguments or results: tensors, sequences, tables."""
        if isinstance(tree, Tensor):
            if tree.device == self.device:
                found.append(tree)
        elif isinstance(tree, tuple | list):
            for item in tree:
                self._collect(item, found)
        elif isinstance(tree, dict):
            for item in tree.values():
                self._collect(item, found)

    def _note(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._kept:
            return
        num_bytes = storage.nbytes()
        self._live.add(key)
        self._live_bytes += num_bytes
        finalizer = weakref.finalize(storage, self._forget, key, num_bytes)
        finalizer.atexit = False

    def _forget(self, key: int, num_bytes: int) -> None:
        self._live.discard(key)
        self._live_bytes -= num_bytes

    def _update_peak(self) -> None:
        level = self.live_bytes
        region = self._region
        if not region.segments:
            self._begin_segment()
        segment = region.segments[-1]
        if level > segment.peak_bytes:
            segment.peak_bytes = level
            segment.peak_parts = self._parts()
        if level > region.peak_bytes:
            region.peak_bytes = level
            region.peak_block = self.block
            region.peak_parts = segment.peak_parts


class CallRecorder(StepRecorder):
    """A recorder of collectives and messages alone, several times as fast."""

    @property
    def live_bytes(self) -> int:
        """Always 0: this recorder counts no memory."""
        return 0

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = self._result_key(func, args, kwargs)
        known = self._results.find(key)
        if known is not None:
            return known.make()
        result = func(*args, **kwargs)
        if key is not None:
            inputs = self._own_tensors((args, kwargs))
            self._results.note(key, inputs=inputs, result=result, kernel=None)
        return result


@contextmanager
def fused_kernels_on_meta(*, is_for_gpu: bool) -> Iterator[None]:
    """While it is open, attention on the meta device is one fused kernel, as on real devices, and RMSNorm
    as on GPUs; torch decomposes them there.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is overridden
        library.impl("scaled_dot_product_attention", _attend_fused, "AutogradMeta")
        if is_for_gpu:
            library.impl("rms_norm", _norm_fused, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Shapes as `torch.nn.functional.scaled_dot_product_attention`."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    missing = query.shape[-1] - value.shape[-1]
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        F.pad(value, (0, missing)) if missing else value,
        dropout_p,
        is_causal,
        attn_mask=mask,
        scale=scale,
    )
    own: Tensor = out[..., : value.shape[-1]]
    return own


def _norm_fused(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Shapes as `torch.nn.functional.rms_norm`, by the kernel of layer norms, which reads, writes and keeps
    as much; where types differ torch has no kernel, and computes step by step.
    """
    if weight is None or weight.dtype == x.dtype:
        out, *_ = torch.native_layer_norm(x, normalized_shape, weight, None, eps or 0.0)
        return out
    dims = [-1 - index for index in range(len(normalized_shape))]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + (eps or 0.0))
    return ((wide * factor).to(x.dtype) * weight).to(torch.promote_types(x.dtype, weight.dtype))
