"""Mutants of stream synchronization: each removes one wait, which the race checker finds. Run: python -m tests.device.mutants"""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext

from tests.device.fake_device import counts_of, prepare_torch, torch  # it loads the device first
from tests.device.layouts import LAYOUTS, OFFLOAD, Layout
from tests.device.streams import StreamedCall
from weft.checkpoint.host_copy import CopiesUnderWay
from weft.parallel.recompute import offload

ZERO3 = next(layout for layout in LAYOUTS if "zero 3" in layout.options)
OFFLOADED = next(layout for layout in LAYOUTS if OFFLOAD in layout.options)
ZERO1 = next(layout for layout in LAYOUTS if "zero 1" in layout.options)


@contextmanager
def replaced(owner, name, value):
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def without_wait(op: str):
    """Calls of one operation are not waited for."""
    plain = StreamedCall.wait

    def wait(call: StreamedCall) -> None:
        if call.op != op:
            plain(call)

    return replaced(StreamedCall, "wait", wait)


def free_without_wait(call: offload.OffloadedCall) -> None:
    """The memory of a block is freed while it is copied out."""
    call._storages.clear()


@contextmanager
def copies_that_wait_for_nothing():
    """Copies begin beside what writes their sources."""

    def start(copying: offload.CudaCopying, sources, targets):
        with torch.cuda.stream(copying.stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        end = torch.cuda.Event()
        end.record(copying.stream)
        return lambda: torch.cuda.current_stream(copying.device).wait_event(end)

    with replaced(offload.CudaCopying, "start", start):
        yield


MUTANTS = {
    "none": (ZERO3, nullcontext),
    "update_beside_copies": (
        ZERO3,
        lambda: replaced(CopiesUnderWay, "before_change", lambda copies: None),
    ),
    "gather_not_waited_for": (ZERO3, lambda: without_wait("all_gather")),
    "reduction_not_waited_for": (ZERO3, lambda: without_wait("reduce_scatter")),
    "copies_out_not_waited_for": (
        OFFLOADED,
        lambda: replaced(offload.OffloadedCall, "free", free_without_wait),
    ),
    "copies_before_the_computation": (OFFLOADED, copies_that_wait_for_nothing),
    "gather_after_update_not_waited_for": (ZERO1, lambda: without_wait("all_gather")),
}
"""Name -> layout, and how the fault is planted."""


def races_of(name: str) -> dict[str, int]:
    """The races that are found with a fault."""
    layout, plant = MUTANTS[name]
    assert isinstance(layout, Layout)
    with plant():
        found = counts_of(layout, checks_streams=True)["races"]
    assert isinstance(found, dict)
    return found


if __name__ == "__main__":
    prepare_torch()
    for name in MUTANTS:
        print(json.dumps({name: races_of(name)}), flush=True)  # noqa: T201
