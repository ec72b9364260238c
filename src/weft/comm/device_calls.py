"""Calls of one group that run on a device, oldest first: added before their launch, dropped once the device completed them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from weft.comm.group_call import DeviceCall, GroupCall


class DeviceCalls:
    """Calls of a group on a device; the launching thread and the monitor use it at once.

    They complete in the order of their start, since a communicator runs its kernels one after the
    other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[DeviceCall] = deque()

    def add(self, group_calls: Sequence[GroupCall]) -> list[DeviceCall]:
        """Note calls that are about to be launched."""
        added = [DeviceCall(group_call) for group_call in group_calls]
        with self._lock:
            self._drop_completed()
            self._calls.extend(added)
        return added

    def remove(self, calls: Sequence[DeviceCall]) -> None:
        """Forget calls whose launch failed."""
        with self._lock:
            for call in calls:
                self._calls.remove(call)

    def oldest(self) -> DeviceCall | None:
        """The oldest call that is not complete."""
        with self._lock:
            self._drop_completed()
            return self._calls[0] if self._calls else None

    def _drop_completed(self) -> None:
        while self._calls and self._calls[0].is_completed():
            self._calls.popleft()
