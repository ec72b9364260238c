"""Saved activations of a block in host memory between its forward and its backward: `parallel.recompute = "offload"`.

Note [Offloaded activations]
    Copies run on a stream of their own, beside the computation:

        compute   F block 1 | F block 2 | F block 3 ...     B block 3 | B block 2 | B block 1
        copies              | out 1     | out 2 ...         | in 2    | in 1

    out   begins when the forward of the block has been launched, behind it. The memory on the device
          is held until the forward of the next block has been launched, which then waits for the
          copies: so at most two blocks are there, and no kernel gets memory that is still read.
    in    begins with the backward of the block after it, into memory of the compute stream; the
          backward of the block waits for it. What has not left the device yet, as of the last
          block of a stage, is used as it is.

    Out and in are on one stream, so no copy comes back before it has been written. Storages are
    copied whole, once each, and every saved tensor is a view of its copy. Where a backward ends
    early by an error, the compute stream waits for what comes back before its memory is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft.parallel.recompute.recomputed_tensor import SavedTensor, ViewSpec, memory_of

LEAST_BYTES = 2**20
"""Storages below this stay on the device: their copies cost more time than they spare memory."""

Wait = Callable[[], None]
"""Has work that is launched later run after copies that were started."""


class HostCopying(Protocol):
    """Copies between a device and its host."""

    def host_memory(self, source: Tensor) -> Tensor:
        """Memory on the host for a copy of a tensor."""

    def device_memory(self, copy: Tensor) -> Tensor:
        """Memory on the device for a tensor from the host."""

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        """Copy, behind all that was launched."""


class CudaCopying:
    """Copies on a stream of their own. See Note [Offloaded activations]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the copies, made when the first one is."""
        return torch.cuda.Stream(self.device)

    def host_memory(self, source: Tensor) -> Tensor:
        """Pinned, or a copy would block the host; torch keeps what is freed for the next block."""
        return torch.empty_like(source, device="cpu", pin_memory=True)

    def device_memory(self, copy: Tensor) -> Tensor:
        """Of the compute stream: it is free again behind the last kernel there that reads it."""
        return torch.empty_like(copy, device=self.device)

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        """Copy behind what writes the sources, and behind what has used the targets' memory before."""
        # Kernels that write the sources are ahead of the copies, and so are those that still use
        # memory which the allocator has handed out anew for the targets.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        end = torch.cuda.Event()
        end.record(self.stream)
        # A wait of the compute stream; the host goes on.
        return lambda: torch.cuda.current_stream(self.device).wait_event(end)


class MetaCopying:
    """Copies on the meta device, where memory is counted: what is on the host has none there."""

    def host_memory(self, source: Tensor) -> Tensor:
        """One entry that stands for all."""
        return torch.empty(1, dtype=source.dtype).expand(source.shape)

    def device_memory(self, copy: Tensor) -> Tensor:
        """Of the meta device."""
        return torch.empty(copy.shape, dtype=copy.dtype, device="meta")

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        """Nothing is copied."""
        return lambda: None


class _WaitOnce:
    """A wait that the first call does, and later ones need not do again."""

    def __init__(self, wait: Wait) -> None:
        self._wait: Wait | None = wait

    def __call__(self) -> None:
        """Wait, unless that was done."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


def host_copying(device: torch.device) -> HostCopying | None:
    """Copies between a device and its host; None for CPUs, whose memory is the host's."""
    if device.type == "cuda":
        return CudaCopying(device)
    return MetaCopying() if device.type == "meta" else None


@dataclass(eq=False)
class _OffloadedStorage:
    """A storage that autograd saves views of, as one row of entries.

    Attributes:
        version: of the tensor when it was saved.
        source: on the device; None once it has left.
        copy: on the host, once that has begun.
        back: on the device again.
    """

    version: int
    source: Tensor | None
    copy: Tensor | None = None
    back: Tensor | None = None
    has_changed: bool = False

    def check_version(self) -> None:
        """Note whether the tensor was modified in place since it was saved."""
        self.has_changed |= self.source is not None and self.source._version != self.version


@dataclass(frozen=True, eq=False)
class _OffloadedView:
    """What autograd saves in place of a tensor."""

    storage: _OffloadedStorage
    spec: ViewSpec


class OffloadChain:
    """The calls of the offloaded blocks of a stage, in order.

    Attributes:
        host_bytes: that copies take on the host now.
        copied_bytes: that have been copied to the host so far.
    """

    def __init__(self, copying: HostCopying) -> None:
        self.copying = copying
        self.host_bytes = 0
        self.copied_bytes = 0
        self._num_blocks = 0
        self._last: OffloadedCall | None = None
        self._leaving: list[OffloadedCall] = []

    def add_block(self) -> int:
        """The number of one more block of the stage."""
        self._num_blocks += 1
        return self._num_blocks - 1

    def begin(self, block: nn.Module, *, number: int) -> OffloadedCall:
        """The forward of a block for a micro-batch; that of block 0 has no earlier one."""
        self._last = OffloadedCall(self, block, previous=self._last if number else None)
        return self._last

    def add(self, call: OffloadedCall) -> None:
        """The copies of a call have begun; those of others are waited for, and their memory freed."""
        self.free_all_but(call)
        self._leaving.append(call)

    def free_all_but(self, call: OffloadedCall) -> None:
        """Free the memory of calls whose copies have begun, behind these copies."""
        for other in [each for each in self._leaving if each is not call]:
            self._leaving.remove(other)
            other.free()

    def holds(self, call: OffloadedCall) -> bool:
        """Whether the saved tensors of a call are still on the device."""
        return call in self._leaving

    def add_copy(self, storage: _OffloadedStorage, num_bytes: int) -> None:
        """Count a copy on the host as long as its storage is needed."""
        self.host_bytes += num_bytes
        self.copied_bytes += num_bytes
        weakref.finalize(storage, self._forget, num_bytes).atexit = False

    def _forget(self, num_bytes: int) -> None:
        self.host_bytes -= num_bytes


class OffloadedCall:
    """A forward of a block whose saved tensors go to the host. See Note [Offloaded activations]."""

    def __init__(
        self, chain: OffloadChain, block: nn.Module, *, previous: OffloadedCall | None
    ) -> None:
        self._chain = chain
        self._block = block
        self._previous = previous
        self._in_block: set[int] | None = None
        self._storages: dict[tuple[int, torch.dtype], _OffloadedStorage] = {}
        self._copied: list[weakref.ref[_OffloadedStorage]] = []
        self._wait_out: Wait | None = None
        self._wait_back: Wait | None = None
        self._is_in_backward = False

    def run(self, forward: Callable[[], Any]) -> Any:
        """Call the block, and begin the copies of what autograd has saved."""
        with saved_tensors_hooks(self._pack, self._unpack):
            out = forward()
        storages = list(self._storages.values())
        for storage in storages:
            storage.check_version()
        sources = [each.source for each in storages if each.source is not None]
        copies = [self._chain.copying.host_memory(source) for source in sources]
        # The sources stay allocated until the copies of the next block have begun: to free them
        # here, the compute stream would have to wait for these copies at once.
        self._wait_out = self._chain.copying.start(sources, copies)
        for storage, source, copy in zip(storages, sources, copies, strict=True):
            storage.copy = copy
            self._chain.add_copy(storage, source.nbytes)
        # Weak: what no node needs any more when the copies back begin is not copied.
        self._copied = [weakref.ref(storage) for storage in storages]
        self._chain.add(self)
        return out

    def free(self) -> None:
        """Free the memory on the device, behind the copies."""
        assert self._wait_out is not None, "copies have begun"
        # The allocator may give this memory to the next kernel, which must run behind the copies.
        self._wait_out()
        for storage in self._storages.values():
            storage.check_version()
            storage.source = None
        self._storages.clear()

    def _pack(self, tensor: Tensor) -> SavedTensor | _OffloadedView:
        if not self._leaves(tensor):
            return SavedTensor.of(tensor)
        key = memory_of(tensor), tensor.dtype
        storage = self._storages.get(key)
        if storage is None:
            length = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((length,), (1,), 0)
            storage = _OffloadedStorage(tensor._version, whole)
            self._storages[key] = storage
        # Changed in place between two saves: the copy has one of the two contents, so the other
        # one stays on the device.
        elif storage.version != tensor._version:
            return SavedTensor.of(tensor)
        return _OffloadedView(storage, ViewSpec.of(tensor))

    def _leaves(self, tensor: Tensor) -> bool:
        """Whether a saved tensor goes to the host: large, and no parameter or buffer of the block, nor
        a view of one, which stay allocated or are gathered again.
        """
        if tensor.is_leaf and tensor.requires_grad:
            return False
        if tensor.untyped_storage().nbytes() < LEAST_BYTES:
            return False
        if self._in_block is None:
            kept = [*self._block.parameters(), *self._block.buffers()]
            self._in_block = {memory_of(each) for each in kept}
        return memory_of(tensor) not in self._in_block

    def _unpack(self, packed: SavedTensor | _OffloadedView) -> Tensor:
        if isinstance(packed, SavedTensor):
            return packed.get()
        if not self._is_in_backward:
            # The first tensor that the backward asks for. The block before comes back, too, beside
            # the backward of this one.
            self._is_in_backward = True
            self._chain.free_all_but(self)
            self._start_back()
            if self._previous is not None:
                self._previous._start_back()
        storage = packed.storage
        storage.check_version()
        if storage.has_changed:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after the forward had used it"
            )
        if storage.source is not None:
            return packed.spec.view_of(storage.source)
        if storage.back is None:  # it has left between the two parts of a split backward
            self._start_back()
        if self._wait_back is not None:
            # Once for all storages of the call: the event lies behind the last of its copies.
            self._wait_back()
            self._wait_back = None
        assert storage.back is not None, "copies back begin with the backward"
        return packed.spec.view_of(storage.back)

    def _start_back(self) -> None:
        """Begin to copy back what is needed and has left the device, once."""
        # Nothing was freed yet, so the sources themselves are used; their copies stay unread.
        if self._chain.holds(self):
            return
        storages = [storage for each in self._copied if (storage := each()) is not None]
        self._copied = []
        copies = [each.copy for each in storages if each.copy is not None]
        if not copies:
            return
        targets = [self._chain.copying.device_memory(copy) for copy in copies]
        self._wait_back = _WaitOnce(self._chain.copying.start(copies, targets))
        for storage, target in zip(storages, targets, strict=True):
            storage.back = target
            # A backward that an error ends waits for nothing more: without this wait the allocator
            # would give the memory away while the stream of the copies still writes it.
            weakref.finalize(storage, self._wait_back).atexit = False
