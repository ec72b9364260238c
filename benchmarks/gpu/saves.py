"""Saves from a device: copies beside the computation hold the values from before the next update; the stall of a save."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from benchmarks.gpu.report import Row, Settings
from benchmarks.gpu.speed import REHEARSED, WORKLOADS, synchronize, train_step

from weft.checkpoint.host_copy import copy_to_host
from weft.checkpoint.state import write_items
from weft.checkpoint.write_item import snapshot

NUM_TENSORS, NUM_ENTRIES, REHEARSED_ENTRIES = 8, 2**25, 2**10


def check_copies(settings: Settings) -> Iterator[Row]:
    """Overwrite tensors right behind the start of their copies, several times."""
    num_entries = REHEARSED_ENTRIES if settings.is_rehearsal else NUM_ENTRIES
    is_right = True
    for attempt in range(4):
        tensors = []
        for number in range(NUM_TENSORS):
            value = float(10 * attempt + number)
            tensors.append(torch.full((num_entries,), value, device=settings.device))
        expected = [tensor[0].item() for tensor in tensors]
        copies = copy_to_host(tensors)
        copies.under_way.before_change()
        for tensor in tensors:
            tensor.fill_(-1.0)
        copies.under_way.wait()
        for copy, value in zip(copies.tensors, expected, strict=True):
            is_right = is_right and bool((copy == value).all())
    yield Row("copies have the values from before the next change", "", is_right)


def check_stall(settings: Settings) -> Iterator[Row]:
    """How long the host waits for the first and a later snapshot, and how long the copies take."""
    device = torch.device(settings.device)
    workload = (REHEARSED if settings.is_rehearsal else WORKLOADS)[-1]
    step, run_step = train_step(workload, device)
    run_step()
    for name in ("first", "later"):
        synchronize(device)
        start_s = time.perf_counter()
        items = write_items(step.state())
        copied = snapshot(items)
        step.grads.before_next_change(copied.under_way.before_change)
        stall_s = time.perf_counter() - start_s
        run_step()
        copied.under_way.wait()
        total_s = time.perf_counter() - start_s
        num_bytes = sum(item.num_bytes for item in copied.items)
        size = f"{num_bytes / 2**30:.2f} GiB"
        value = f"{stall_s:.3f} s for {size}; with the next step beside it {total_s:.3f} s"
        yield Row(f"{workload.preset}: stall of the {name} save", value)
        del items, copied
