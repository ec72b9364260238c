"""Named ranges of a profiled step for other profilers: `record_function` of torch.profiler, and NVTX on CUDA."""

from __future__ import annotations

import torch
from torch.autograd.profiler import record_function

PREFIX = "weft: "


class NamedRanges:
    """Ranges that are open on a rank, the innermost last.

    torch.profiler watches the thread that started it: that of a rank of torchrun or Slurm. Around
    `weft.train`, whose ranks are other threads, it needs `profile_all_threads` (docs/trace.md).

    Args:
        device: NVTX ranges are opened on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_nvtx = device.type == "cuda"
        self._open: list[record_function | None] = []

    def are_seen(self) -> bool:
        """Whether another profiler may see them; ranges cost a CPU more than what is recorded."""
        return self._has_nvtx or torch.autograd.profiler._is_profiler_enabled

    def push(self, name: str) -> None:
        """Open a range."""
        entered = None
        if torch.autograd.profiler._is_profiler_enabled:
            entered = record_function(PREFIX + name)
            entered.__enter__()
        if self._has_nvtx:
            torch.cuda.nvtx.range_push(PREFIX + name)
        self._open.append(entered)

    def pop(self) -> None:
        """Close the innermost one, if one is open: a profiler may have begun inside it."""
        if not self._open:
            return
        entered = self._open.pop()
        if entered is not None:
            entered.__exit__(None, None, None)
        if self._has_nvtx:
            torch.cuda.nvtx.range_pop()

    def close(self) -> None:
        """Close all ranges that are open."""
        while self._open:
            self.pop()
