"""The ranks on this host: which of a group share its memory, the segment that they get, and who of them has left.

Note [Meeting on a host]
    member 0    makes the segment and a socket, sets `socket` to its host and the name of the socket
    member i    reads `socket`; on another host: sets `elsewhere`. Else connects, sends its name
    member 0    has heard of all: sends the names of all and the descriptor of the segment
    member i    maps it, connects to the other members, answers
    member 0    has all answers: sends the verdict, the same to all: the segment, or gloo
    The sockets are Unix sockets with abstract names, which belong to a network namespace and are
    no files: who can connect can share memory, in containers, too. Only processes of the same user
    are served.

Note [Who has left]
    Each rank listens at a socket of its own and accepts no connection. A connection to it succeeds, waits
    in its queue, and hangs up when the rank ends, however it ends: the kernel closes the socket.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weft.comm import futex
from weft.comm.shared_segment import SharedSegment
from weft.core.transports import SHARED_MEMORY, cpu_transport, cpu_transport_faults
from weft.errors import LaunchError

NAME_PREFIX = "\0weft-"
"""Of the abstract names of sockets."""
MAX_MEMBERS = 256
"""Of a group in shared memory: halves of slots become small."""
MAX_MESSAGE_BYTES = 2**20
MAX_WAITING = 4096
"""Connections that wait in the queue of a socket; the kernel may allow fewer."""
LOOK_S, CONNECT_S = 0.01, 5.0
SOCKET_KEY, ELSEWHERE_KEY = "socket", "elsewhere"


class MeetingStore(Protocol):
    """The part of torch.distributed.Store that is used here; `get` waits for its key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def host_identity() -> str:
    """What is equal for processes that can share memory; "" where that is not known.

    The boot of the kernel and the network namespace, in which sockets find each other: containers
    of one host may share the first and not the second.
    """
    if not futex.has_futexes() or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Meeting:
    """A group that meets.

    Attributes:
        store: keys of this group alone.
        ranks: its members.
        index: place of this rank.
        deadline_s: time.monotonic() at which it is given up.
    """

    store: MeetingStore
    ranks: tuple[int, ...]
    index: int
    deadline_s: float

    @property
    def left_s(self) -> float:
        """Time left, at least a little: 0 would mean not to wait in a special way."""
        return max(0.001, self.deadline_s - time.monotonic())


class LocalPeers:
    """The other ranks of this host, as far as this one shares memory with them."""

    def __init__(self) -> None:
        if faults := tuple(cpu_transport_faults()):
            raise LaunchError(*faults)
        self._identity = host_identity() if cpu_transport() == SHARED_MEMORY else ""
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}
        self._hung_up = select.poll()
        self._has_noted = False

    def meet(self, meeting: Meeting) -> SharedSegment | None:
        """The segment of a group; None: its members take gloo, all of them. It blocks until all
        members have come.
        """
        if meeting.index > 0:
            return self._join(meeting)
        if not self._identity or len(meeting.ranks) > MAX_MEMBERS:
            meeting.store.set(SOCKET_KEY, "{}")
            return None
        try:
            return self._lead(meeting)
        except (OSError, ValueError) as error:
            with suppress(RuntimeError):  # the store is lost: the group cannot be connected at all
                meeting.store.set(SOCKET_KEY, "{}")
            self._note(meeting.ranks, error)
            return None

    def lost(self) -> frozenset[int]:
        """Ranks that have left."""
        gone = {file for file, _ in self._hung_up.poll(0)}
        return frozenset(
            rank
            for rank, connection in list(self._connections.items())
            if connection.fileno() in gone
        )

    def close(self) -> None:
        """Let the others see that this rank leaves."""
        for connection in (self._listener, *self._connections.values()):
            if connection is not None:
                connection.close()
        self._connections.clear()

    def _lead(self, meeting: Meeting) -> SharedSegment | None:
        with ExitStack() as stack:
            segment_file = SharedSegment.create(len(meeting.ranks))
            stack.callback(os.close, segment_file)
            server = stack.enter_context(_listen())
            place = {"host": self._identity, "name": _name_of(server)}
            meeting.store.set(SOCKET_KEY, json.dumps(place))
            members = _accept_all(server, meeting, stack)
            if members is None:
                return None
            names = {0: self._own_name()}
            for member in members:
                index, name = json.loads(_receive(member, meeting))
                names[index] = name
            for member in members:
                _send(member, json.dumps(names), files=(segment_file,))
            reasons = [_receive(member, meeting) for member in members]
            own_reason = self._connect_peers(meeting, names)
            reason = next(filter(None, (own_reason, *reasons)), "")
            for member in members:
                _send(member, reason)
            if reason:
                self._note(meeting.ranks, reason)
                return None
            return SharedSegment(segment_file, len(meeting.ranks))

    def _join(self, meeting: Meeting) -> SharedSegment | None:
        place = json.loads(meeting.store.get(SOCKET_KEY))
        if not self._identity or place.get("host") != self._identity:
            meeting.store.set(ELSEWHERE_KEY, "another host")
            return None
        try:
            leader = _connect(place["name"])
        except OSError as error:
            meeting.store.set(ELSEWHERE_KEY, str(error))
            return None
        with leader:
            try:
                return self._receive_segment(leader, meeting)
            except (OSError, ValueError):
                return None  # member 0 sees the connection closed, and names the reason

    def _receive_segment(self, leader: socket.socket, meeting: Meeting) -> SharedSegment | None:
        _send(leader, json.dumps([meeting.index, self._own_name()]))
        text, files = _receive_with_files(leader, meeting)
        try:
            segment = SharedSegment(files[0], len(meeting.ranks))
        finally:
            for file in files:
                os.close(file)
        _send(leader, self._connect_peers(meeting, _by_place(text)))
        is_agreed = _receive(leader, meeting) == ""
        return segment if is_agreed else None

    def _own_name(self) -> str:
        """Name of the socket by which the others see that this rank is there."""
        if self._listener is None:
            self._listener = _listen()
        return _name_of(self._listener)

    def _connect_peers(self, meeting: Meeting, names: dict[int, str]) -> str:
        """Connect to the other members; why that is not possible, "" if it is."""
        for place, rank in enumerate(meeting.ranks):
            if place == meeting.index or rank in self._connections:
                continue
            try:
                connection = _connect(names[place])
            except OSError as error:
                return f"rank {rank} cannot be reached: {error}"
            self._connections[rank] = connection
            self._hung_up.register(connection, select.POLLHUP | select.POLLERR)
        return ""

    def _note(self, ranks: tuple[int, ...], reason: object) -> None:
        """Say once why ranks of this host do not share memory."""
        if not self._has_noted:
            self._has_noted = True
            members = " ".join(map(str, ranks))
            sys.stderr.write(f"note: ranks {members} exchange over gloo, not in memory: {reason}\n")


# Messages of a meeting are the length of the text, and the text. The descriptors travel with the first byte.

_LENGTH = struct.Struct("<I")


def _listen() -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"{NAME_PREFIX}{secrets.token_hex(16)}")
    server.listen(MAX_WAITING)
    return server


def is_name_of_rank(name: str | bytes) -> bool:
    """Whether the socket of this name is one by which a rank is seen."""
    return isinstance(name, bytes) and name.startswith(NAME_PREFIX.encode())


def _by_place(text: str) -> dict[int, str]:
    return {int(place): name for place, name in json.loads(text).items()}


def _name_of(server: socket.socket) -> str:
    name: bytes = server.getsockname()
    return name.decode("ascii")


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(name)
        _check_user(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError unless the other end is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"a process of user {user} has the socket, not of {os.getuid()}")


def _accept_all(
    server: socket.socket, meeting: Meeting, stack: ExitStack
) -> list[socket.socket] | None:
    """Connections of all other members; None as soon as one of them is elsewhere."""
    members: list[socket.socket] = []
    server.settimeout(LOOK_S)
    while len(members) < len(meeting.ranks) - 1:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if meeting.store.check([ELSEWHERE_KEY]):
                return None
            if time.monotonic() > meeting.deadline_s:
                raise
            continue
        stack.enter_context(connection)
        with suppress(PermissionError):  # of another user: no member
            _check_user(connection)
            members.append(connection)
    return members


def _send(connection: socket.socket, text: str, *, files: Sequence[int] = ()) -> None:
    message = text.encode()
    message = _LENGTH.pack(len(message)) + message
    if files:
        sent = socket.send_fds(connection, [message], list(files))
        message = message[sent:]
    connection.sendall(message)


def _receive(connection: socket.socket, meeting: Meeting) -> str:
    text, _ = _receive_with_files(connection, meeting, most_files=0)
    return text


def _receive_with_files(
    connection: socket.socket, meeting: Meeting, *, most_files: int = 1
) -> tuple[str, list[int]]:
    """A message and its descriptors.

    Raises:
        OSError: the other end has closed the connection, or is late.
    """
    connection.settimeout(meeting.left_s)
    received, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, most_files)
    while len(received) < _LENGTH.size or len(received) < _LENGTH.size + _length(received):
        more = connection.recv(MAX_MESSAGE_BYTES)
        if not more:
            raise ConnectionResetError("a member left while the group met")
        received += more
    return received[_LENGTH.size :].decode(), files


def _length(received: bytes) -> int:
    (length,) = _LENGTH.unpack_from(received)
    return int(length)
