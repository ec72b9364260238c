"""Copies of tensors in host memory: at once from the CPU, on a stream of their own beside the computation from GPUs.

Note [Copies beside the computation]
    A save copies the state of this rank to the host: seconds for tens of gigabytes. On GPUs the
    copies run on a stream of their own, behind what was launched before them; the host and the
    computation go on. Three waits keep the numbers right:

        the stream of the copies   for what was launched before, which writes the state
        the optimizer's stream     for the copies, before the next update changes the state
        the writing thread         for the copies, before it reads the host memory

    Host memory is pinned, or a copy would block the host; torch keeps freed pinned memory for the
    next save. Sources are held until the copies have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopies:
    """Copies of tensors in host memory.

    Attributes:
        tensors: the copies, in the order of the sources; to be read after `under_way.wait()`.
    """

    tensors: tuple[Tensor, ...]
    under_way: CopiesUnderWay


def copy_to_host(sources: Sequence[Tensor]) -> HostCopies:
    """Copy tensors to the host; from GPUs without a wait: Note [Copies beside the computation]."""
    pairs: list[_CopyPair] = []
    pairs_of_device: dict[torch.device, list[_CopyPair]] = {}
    for source in sources:
        pair = _CopyPair(source.detach(), _empty_on_host(source))
        pairs.append(pair)
        if source.is_cuda:
            pairs_of_device.setdefault(source.device, []).append(pair)
        else:
            # On the CPU at once: training would change what a later copy reads.
            pair.copy.copy_(pair.source)
    ends = [_start_copies(device, started) for device, started in pairs_of_device.items()]
    tensors = tuple(pair.copy for pair in pairs)
    return HostCopies(tensors, CopiesUnderWay(ends))


class CopiesUnderWay:
    """Copies from GPUs that may not have ended; none for tensors on the CPU."""

    def __init__(self, ends: Sequence[_DeviceEnd]) -> None:
        self._ends = list(ends)

    def __bool__(self) -> bool:
        return bool(self._ends)

    def before_change(self) -> None:
        """Have what is launched from now on, such as an update of the sources, run after the copies;
        the host does not wait.
        """
        for end in list(self._ends):
            stream = torch.cuda.current_stream(end.device)
            stream.wait_event(end.event)

    def wait(self) -> None:
        """Block until the copies hold the values; from any thread."""
        for end in list(self._ends):
            with torch.cuda.device(end.device):  # else a thread would open a context on the first
                end.event.synchronize()
        # With them the sources are freed.
        self._ends.clear()


@dataclass(frozen=True)
class _CopyPair:
    source: Tensor
    copy: Tensor


@dataclass(frozen=True)
class _DeviceEnd:
    """The end of the copies from one device, and their sources, which are held until then."""

    device: torch.device
    event: torch.cuda.Event
    sources: tuple[Tensor, ...]


def _start_copies(device: torch.device, pairs: Sequence[_CopyPair]) -> _DeviceEnd:
    stream = torch.cuda.Stream(device)
    # Behind what has written the sources, the update above all.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for pair in pairs:
            pair.copy.copy_(pair.source, non_blocking=True)
    event = torch.cuda.Event()
    event.record(stream)
    # Held until the end: the allocator knows nothing of this stream, and would give their memory to
    # kernels of the compute stream while the copies read it.
    sources = tuple(pair.source for pair in pairs)
    return _DeviceEnd(device, event, sources)


def _empty_on_host(source: Tensor) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
