"""Whether this machine may have a GPU, by the files of its drivers: nothing is started, no library loaded."""

from __future__ import annotations

from pathlib import Path

DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Where none of these exists, no runtime finds a GPU."""


def may_have_gpu() -> bool:
    """Whether a driver of GPUs is loaded."""
    return any(path.exists() for path in DEVICE_FILES)
