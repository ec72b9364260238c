"""NCCL communicators of one rank: the world's first, the others split from it while the groups of a plan are connected.

Note [Split from the world]
    `ncclCommSplit` makes a communicator from a larger one, without another exchange of addresses.
    All ranks of the larger one call it, each with the number (color) of its group; a rank that needs
    no group of a partition calls it too, without a color. A group that is connected later, when the
    others do not take part, is made by its members alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

WATCHDOG_MARGIN = timedelta(seconds=60)
"""How much later than weft's monitor, which names the ranks that are missing, the watchdog of torch
ends a process whose call hangs.
"""


class NcclGroups:
    """Makes the communicators of this rank's GPU.

    Args:
        process_group: torch.distributed's ProcessGroupNCCL; None in a build without it.
        device: of this rank.
        timeout: of a call.
    """

    def __init__(self, process_group: Any, device: torch.device, timeout: timedelta) -> None:
        self._process_group = process_group
        self._device = device
        self._timeout = timeout
        self._parent: Any = None
        self._is_planned = False

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Inside the block every rank connects its groups of one plan, the world first."""
        self._is_planned = True
        try:
            yield
        finally:
            self._is_planned = False
            self._parent = None

    def connect(
        self,
        store: Any,
        *,
        index: int,
        size: int,
        color: int,
    ) -> Any:
        """The process group of `size` members, of which this rank is number `index`; it blocks until
        all have come.

        Args:
            store: in which its members find each other.
            color: differs between the groups of one partition.
        """
        options = self._process_group.Options(is_high_priority_stream=True)
        options._timeout = self._timeout + WATCHDOG_MARGIN
        if self._parent is not None:
            options.split_from = self._parent
            options.split_color = color
        made = self._process_group(store, index, size, options)
        made.eager_connect_single_device(self._device)
        if self._is_planned and self._parent is None and hasattr(options, "split_from"):
            self._parent = made
        return made

    def leave_out(self) -> None:
        """Take part in a split of the world without a group of this rank."""
        if self._parent is not None:
            self._parent.perform_nocolor_split(self._device)
