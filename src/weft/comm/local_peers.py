"""The ranks on this host that this one shares memory with: how it is seen by them, and who of them has left.

Note [Who has left]
    Each rank listens at a socket of its own and accepts no connection. A connection to it succeeds, waits
    in its queue, and hangs up when the rank ends, however it ends: the kernel closes the socket.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from weft.comm import unix_sockets
from weft.comm.shared_memory import has_futexes
from weft.core.transports import SHARED_MEMORY, cpu_transport, cpu_transport_faults
from weft.errors import LaunchError


def host_identity() -> str:
    """What is equal for processes that can share memory; "" where that is not known.

    The boot of the kernel and the network namespace, in which sockets find each other: containers
    of one host may share the first and not the second.
    """
    if not has_futexes() or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


class LocalPeers:
    """The other ranks of this host, as far as this one shares memory with them.

    Attributes:
        identity: of this host; "" if this rank shares no memory.

    Raises:
        LaunchError: the environment names an unknown transport.
    """

    def __init__(self) -> None:
        if faults := tuple(cpu_transport_faults()):
            raise LaunchError(*faults)
        self.identity = host_identity() if cpu_transport() == SHARED_MEMORY else ""
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}
        self._hung_up = select.poll()
        self._has_noted = False

    def own_name(self) -> str:
        """Name of the socket by which the others see that this rank is there."""
        if self._listener is None:
            self._listener = unix_sockets.listen()
        return unix_sockets.name_of(self._listener)

    def connect(self, names: Mapping[int, str]) -> str:
        """Connect to ranks, by the names of their sockets; why that is not possible, "" if it is."""
        for rank, name in names.items():
            if rank in self._connections:
                continue
            try:
                connection = unix_sockets.connect(name)
            except OSError as error:
                return f"rank {rank} cannot be reached: {error}"
            self._connections[rank] = connection
            self._hung_up.register(connection, select.POLLHUP | select.POLLERR)
        return ""

    def lost(self) -> frozenset[int]:
        """Ranks that have left."""
        gone = {file for file, _ in self._hung_up.poll(0)}
        connections = list(self._connections.items())
        return frozenset(rank for rank, connection in connections if connection.fileno() in gone)

    def note(self, ranks: tuple[int, ...], reason: object) -> None:
        """Say once why ranks of this host do not share memory."""
        if not self._has_noted:
            self._has_noted = True
            members = " ".join(map(str, ranks))
            sys.stderr.write(f"note: ranks {members} exchange over gloo, not in memory: {reason}\n")

    def close(self) -> None:
        """Let the others see that this rank leaves."""
        for connection in (self._listener, *self._connections.values()):
            if connection is not None:
                connection.close()
        self._connections.clear()
