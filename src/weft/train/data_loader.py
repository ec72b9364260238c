"""Load the micro-batches of a step onto this rank's device, and prefetch those of the next steps in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from weft.data.order import Ints, draw_keys, layout_of, places_of_step
from weft.data.samples import Samples
from weft.models.common.batch import IGNORE, Batch, with_later_targets

T = TypeVar("T")
POLL_S = 0.05
"""Interval at which a prefetch thread with a full queue checks whether it should stop."""


@dataclass(frozen=True)
class DataLoader:
    """Micro-batches of one rank: a pure function of seed, step and the rank's index along the data
    axes.

    Attributes:
        global_size, micro_size: sequences of a step over all ranks, and of a micro-batch.
        index, degree: index of this rank along the data axes, and their size.
        context_index, context_degree: index of this rank among those that share each sequence, and
            their number.
        later: whether the model also reads targets of later positions (multi-token prediction).
        outer: groups of data ranks that take consecutive micro-batches.
    """

    samples: Samples
    global_size: int
    micro_size: int
    seed: int
    index: int
    degree: int
    device: torch.device
    context_index: int = 0
    context_degree: int = 1
    later: bool = False
    outer: int = 1

    def batches(self, step: int) -> list[Batch]:
        """Micro-batches of step `step` (from 0), in the order of the schedule's micro-batch
        numbers.
        """
        chosen = samples_of(self.samples, step, global_size=self.global_size, seed=self.seed)
        places = self._local(places_of_step(step, self.global_size))
        keys = torch.from_numpy(draw_keys(places, seed=self.seed)).to(self.device)
        batches = self.micro_batches(chosen)
        return [replace(batch, draw_keys=own) for batch, own in zip(batches, keys, strict=True)]

    def micro_batches(self, chosen: Ints) -> list[Batch]:
        """This rank's micro-batches of a global batch of these samples, of which nothing is dropped;
        a negative number is a sample without targets.
        """
        sequences = whole_batch(self.samples, self._local(chosen), later=self.later)
        shard = sequences.columns(index=self.context_index, degree=self.context_degree)
        on_device = shard.map(self._to_device)
        starts = range(0, len(sequences.inputs), self.micro_size)
        return [on_device.rows(slice(start, start + self.micro_size)) for start in starts]

    def _local(self, of_samples: Ints) -> Ints:
        """This rank's numbers of those of a global batch, [micro-batch, place]."""
        return layout_of(
            of_samples,
            index=self.index,
            degree=self.degree,
            micro_size=self.micro_size,
            outer=self.outer,
        )

    def _to_device(self, tensor: Tensor) -> Tensor:
        # In the thread of the prefetch, on the same default stream as the kernels that read it: no
        # event has to order the two.
        return tensor.to(self.device)


def samples_of(samples: Samples, step: int, *, global_size: int, seed: int) -> Ints:
    """Numbers of the samples of step `step` (from 0), the same on every rank."""
    return samples.at(places_of_step(step, global_size), seed=seed)


def whole_batch(samples: Samples, chosen: Ints, *, later: bool) -> Batch:
    """These samples with whole sequences; the shape of `chosen` is flattened."""
    arrays = samples.read(chosen.clip(min=0))
    is_filler = chosen.ravel() < 0
    arrays.targets[is_filler] = IGNORE
    if arrays.pairs is not None:
        arrays.pairs[is_filler] = False
    tensors: dict[str, Any] = {}
    for name, array in vars(arrays).items():
        if isinstance(array, Mapping):
            tensors[name] = {key: torch.from_numpy(field) for key, field in array.items()}
        elif array is not None:
            tensors[name] = torch.from_numpy(array)
    batch = Batch(**tensors)
    return with_later_targets(batch) if later else batch


@contextmanager
def prefetch(read: Callable[[int], T], steps: Iterable[int], *, most: int) -> Iterator[Iterator[T]]:
    """Yield an iterator over `read(step)` in the order of `steps`; up to `most` results wait in a
    queue, 0 reads lazily.

        with prefetch(loader.batches, range(100), most=2) as batches:
            for batch in batches: ...

    An error in the thread is raised where its result would have been taken. On exit the thread has
    ended.
    """
    if not most:
        yield map(read, steps)
        return
    prefetcher = _Prefetcher(read, steps, most=most)
    prefetcher.thread.start()
    try:
        yield prefetcher.results()
    finally:
        prefetcher.stop()


@dataclass(frozen=True)
class _PrefetchResult(Generic[T]):
    value: T


class _Prefetcher(Generic[T]):
    """A thread that reads into a bounded queue: results, then None at the end or the error that
    stopped it.
    """

    def __init__(self, read: Callable[[int], T], steps: Iterable[int], *, most: int) -> None:
        self._read = read
        self._steps = steps
        self._queue: queue.Queue[_PrefetchResult[T] | BaseException | None] = queue.Queue(
            maxsize=most
        )
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def _run(self) -> None:
        try:
            for step in self._steps:
                result = _PrefetchResult(self._read(step))
                if not self._put(result):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the consuming thread
            self._put(error)

    def _put(self, item: _PrefetchResult[T] | BaseException | None) -> bool:
        """Put into the queue when there is room; False if the consumer has stopped."""
        while not self._stopped.is_set():
            try:
                # With a time-out: a consumer that has stopped takes nothing from a full queue any more.
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def results(self) -> Iterator[T]:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item.value

    def stop(self) -> None:
        self._stopped.set()
        # The thread may be in the middle of a read, from files or a device that are closed next.
        self.thread.join()
