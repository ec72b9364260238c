"""Peak of a rank's tensors on the CPU within one step: what it holds before, and what torch's allocator reports meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


class AllocatorPeak:
    """The peak between two calls, of allocations of the thread that makes them.

    The resident set of the process says less: it also has libraries, buffers of gloo and pages that
    the C library keeps. The CPU's allocator has no statistics of its own; it reports to the profiler.

    Args:
        held_bytes: what the rank holds between steps.
    """

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        self._held_bytes = held_bytes
        self._held = 0
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to record, between steps."""
        self._held = self._held_bytes()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def stop(self) -> int:
        """Bytes at the peak since the start."""
        assert self._profile is not None, "it was started"
        self._profile.stop()
        profiler = self._profile.profiler
        self._profile = None
        level = peak = self._held
        assert profiler is not None
        assert profiler.kineto_results is not None
        for event in profiler.kineto_results.events():
            if event.name() == "[memory]":
                level += event.nbytes()  # type: ignore[attr-defined]  # not in the stub
                peak = max(peak, level)
        return peak
