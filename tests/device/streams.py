"""CUDA streams and events as order alone: which access of a tensor comes before which, and where none does.

Each stream has a clock, a count of its operations. A stream knows how far it has seen the others: a wait for an event
takes over what the recording stream knew. Two accesses of overlapping memory, one of them a write, must be ordered, and
memory is freed for the next tensor of the stream that allocated it: all accesses must come before that point.
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.comm.transport import Call

MAIN = "main"
HOST = "host"
Clock = dict[str, int]
"""Stream -> operations of it that come before."""


@dataclass
class Access:
    """An operation that reads or writes some bytes."""

    stream: str
    time: int
    start: int
    stop: int
    is_write: bool
    place: str


@dataclass
class Memory:
    """A storage: who allocated it, and its accesses."""

    weak: StorageWeakRef
    allocated_by: str
    accesses: list[Access] = field(default_factory=list)


class Streams:
    """The streams of one device, and the races among them.

    Attributes:
        num_gathers_behind: all-gathers that were launched behind a reduction of the same stream that
            nothing has waited for.
    """

    def __init__(self) -> None:
        self.is_checking = False
        self.current = MAIN
        self.clocks: dict[str, Clock] = {MAIN: {}, HOST: {}}
        self.memories: dict[int, Memory] = {}
        self.shared: set[int] = set()
        self.races: Counter[str] = Counter()
        self.num_streams = 0
        self.beside: dict[str, list[int]] = {}
        self.last_calls: dict[str, StreamedCall] = {}
        self.num_gathers_behind = 0

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})

    def wait(self, stream: str, seen: Clock) -> None:
        """Later operations of `stream` come after all that `seen` counts."""
        clock = self.clock(stream)
        for other, time in seen.items():
            clock[other] = max(clock.get(other, 0), time)

    def run(self, reads, writes, *, stream: str | None = None) -> None:
        """One operation."""
        stream = stream or self.current
        clock = self.clock(stream)
        time = clock.get(stream, 0) + 1
        clock[stream] = time
        self.find_freed()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, stream, time, is_write=is_write)

    def allocate(self, tensor: Tensor) -> None:
        """New memory of the current stream, which another one may be the first to write."""
        self.find_freed()
        storage = tensor.untyped_storage()
        self.memories[storage._cdata] = Memory(StorageWeakRef(storage), self.current)

    def overlap(self) -> dict[str, float]:
        """Operation -> share of its calls beside which the computation goes on."""
        return {
            op: sum(count > 0 for count in counts) / len(counts)
            for op, counts in self.beside.items()
        }

    def _access(self, tensor: Tensor, stream: str, time: int, *, is_write: bool) -> None:
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None or memory.weak.expired():
            self.shared.discard(storage._cdata)
            memory = Memory(StorageWeakRef(storage), self.current)
            self.memories[storage._cdata] = memory
        if stream != memory.allocated_by:
            self.shared.add(storage._cdata)
        start, stop = _bytes_of(tensor)
        clock = self.clock(stream)
        kept = []
        for other in memory.accesses:
            is_before = clock.get(other.stream, 0) >= other.time
            overlaps = other.start < stop and start < other.stop
            if overlaps and not is_before and (is_write or other.is_write):
                what = f"{other.stream}: {other.place} | {stream}: {_place()}"
                self.races[what] += 1
            is_covered = is_before and is_write and start <= other.start and other.stop <= stop
            if not is_covered:
                kept.append(other)
        same = [each for each in kept if each.stream == stream and each.is_write == is_write]
        for each in same:
            if each.start == start and each.stop == stop:
                kept.remove(each)
        place = _place() if stream != MAIN else "computation"
        kept.append(Access(stream, time, start, stop, is_write, place))
        memory.accesses = kept

    def find_freed(self) -> None:
        """Memory that was freed goes to the next tensor of the stream that allocated it."""
        for key in list(self.shared):
            memory = self.memories[key]
            if memory.weak.expired():
                self.shared.discard(key)
                del self.memories[key]
                self._free(memory)

    def free(self, storage) -> None:
        """The storage is resized to nothing."""
        memory = self.memories.pop(storage._cdata, None)
        self.shared.discard(storage._cdata)
        if memory is not None:
            self._free(memory)

    def _free(self, memory: Memory) -> None:
        clock = self.clock(memory.allocated_by)
        for access in memory.accesses:
            if access.stream == HOST or access.stream == memory.allocated_by:
                continue
            if clock.get(access.stream, 0) < access.time:
                self.races[f"freed while {access.stream}: {access.place}"] += 1


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + extent * tensor.element_size()


def _place() -> str:
    for frame in reversed(traceback.extract_stack(limit=40)[:-2]):
        if "/src/weft/" in frame.filename:
            return f"{frame.filename.split('/src/weft/')[1]}: {frame.line}"
    return "elsewhere"


class StreamedCall:
    """A collective or message on the stream of its communicator, as ProcessGroupNCCL has one: it
    begins after what the current stream has, and `wait` has the current stream go on after it.
    """

    def __init__(self, streams: Streams, call: Call, stream: str) -> None:
        self.streams = streams
        self.op = call.op
        self.is_waited_for = False
        last = streams.last_calls.get(stream)
        if last is not None and not last.is_waited_for:
            is_behind = (last.op, call.op) == ("reduce_scatter", "all_gather")
            streams.num_gathers_behind += is_behind
        streams.last_calls[stream] = self
        self.launched_at = streams.clock(MAIN).get(MAIN, 0)
        streams.wait(stream, streams.clock(streams.current))
        reads = [] if call.input is None else [call.input]
        writes = [] if call.output is None else [call.output]
        streams.run(reads, writes, stream=stream)
        self.end = dict(streams.clock(stream))

    def wait(self) -> None:
        streams = self.streams
        beside = streams.clock(MAIN).get(MAIN, 0) - self.launched_at
        streams.beside.setdefault(self.op, []).append(beside)
        streams.wait(streams.current, self.end)
        self.is_waited_for = True

    def is_completed(self) -> bool:
        return True


class OrderedOperations(TorchDispatchMode):
    """Notes every operation on the fake device with the current stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name.endswith("resize_") and isinstance(args[0], Tensor) and args[1] == 0:
            self.streams.free(args[0].untyped_storage())
        outputs = func(*args, **kwargs)
        if "empty" in name:
            for tensor in _cuda_tensors(outputs):
                self.streams.allocate(tensor)
        if func.is_view or any(word in name for word in WITHOUT_ACCESS):
            return outputs
        mutated = _mutated(func, args, kwargs)
        inputs = _cuda_tensors((args, kwargs))
        known = {id(x) for x in inputs}
        reads = [x for x in inputs if id(x) not in mutated]
        writes = [x for x in inputs if id(x) in mutated]
        writes += [x for x in _cuda_tensors(outputs) if id(x) not in known]
        if reads or writes:
            self.streams.run(reads, writes)
        return outputs


WITHOUT_ACCESS = ("empty", "detach", "alias", "set_")
"""Parts of the names of operations that touch no memory of a tensor."""


def _cuda_tensors(values: object) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [x for x in tensors if x.is_cuda]


def _mutated(func, args, kwargs) -> set[int]:
    """Ids of the arguments that an operation writes into."""
    given = list(zip(func._schema.arguments, args, strict=False))
    for schema in func._schema.arguments:
        if schema.name in kwargs:
            given.append((schema, kwargs[schema.name]))
    mutated = set()
    for schema, argument in given:
        if schema.alias_info is not None and schema.alias_info.is_write:
            mutated.update(id(leaf) for leaf in tree_leaves(argument))
    return mutated


@contextmanager
def cuda_streams(streams: Streams):
    """torch.cuda's streams and events, of the fake device."""

    class Event:
        def __init__(self, *args, **kwargs) -> None:
            self.seen: Clock = {}

        def record(self, stream=None) -> None:
            name = streams.current if stream is None else stream.name
            self.seen = dict(streams.clock(name))

        def synchronize(self) -> None:
            streams.wait(HOST, self.seen)

    class Stream:
        def __init__(self, device=None, *, name: str = "") -> None:
            if not name:
                streams.num_streams += 1
                name = f"side {streams.num_streams}"
            self.name = name

        def wait_stream(self, other) -> None:
            streams.wait(self.name, streams.clock(other.name))

        def wait_event(self, event) -> None:
            streams.wait(self.name, event.seen)

    @contextmanager
    def stream_context(stream):
        before = streams.current
        streams.current = stream.name
        try:
            yield
        finally:
            streams.current = before

    @contextmanager
    def device_context(device):
        yield

    plain_resize = torch.UntypedStorage.resize_
    plain_empty = torch.empty

    def resize(storage, size):
        if storage.device.type == "cuda" or storage._cdata in streams.memories:
            streams.free(storage)
        return plain_resize(storage, size)

    def empty(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return plain_empty(*args, **kwargs)

    replaced = {
        "Event": Event,
        "Stream": Stream,
        "stream": stream_context,
        "device": device_context,
        "current_stream": lambda device=None: Stream(name=streams.current),
    }
    before = {name: getattr(torch.cuda, name) for name in replaced}
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.UntypedStorage.resize_ = resize
    torch.empty = empty
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain_resize
        torch.empty = plain_empty
        for name, value in before.items():
            setattr(torch.cuda, name, value)
