"""Memory of this machine and this process; also where /proc is missing (a bare chroot, a sandbox)."""

from __future__ import annotations

import os
import resource

import psutil


def total_bytes() -> int:
    """Memory of the machine."""
    try:
        return int(psutil.virtual_memory().total)
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Memory that new allocations can get without swapping; without /proc what no page is used for."""
    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process; without /proc the most that it has had."""
    try:
        return int(psutil.Process().memory_info().rss)
    except (OSError, psutil.Error):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
