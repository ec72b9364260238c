"""The ranks on this host: sockets that carry descriptors, who has left, and how a group gets a segment of memory.

Note [Who has left]
    Each rank listens at a socket of its own and accepts no connection. A connection to it succeeds, waits
    in its queue, and hangs up when the rank ends, however it ends: the kernel closes the socket.

Note [Meeting on a host]
    member 0    makes the segment and a socket, sets `socket` to its host and the name of the socket
    member i    reads `socket`; on another host: sets `elsewhere`. Else connects, sends its name
    member 0    has heard of all: sends the names of all and the descriptor of the segment
    member i    maps it, connects to the other members, answers
    member 0    has all answers: sends the verdict, the same to all: the segment, or gloo
    The sockets are Unix sockets with abstract names, which belong to a network namespace and are
    no files: who can connect can share memory, in containers, too. Only processes of the same user
    are served.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from weft.comm.shared_memory import SharedSegment, has_futexes
from weft.core.transports import SHARED_MEMORY, cpu_transport, cpu_transport_faults
from weft.errors import LaunchError

NAME_PREFIX = "\0weft-"
"""Of the abstract names of sockets."""
MAX_MESSAGE_BYTES = 2**20
MAX_WAITING = 4096
"""Connections that wait in the queue of a socket; the kernel may allow fewer."""
CONNECT_S = 5.0
_LENGTH = struct.Struct("<I")
"""Before the text of a message. The descriptors travel with its first byte."""


def listening_socket() -> socket.socket:
    """A socket of a new name that others can connect to."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"{NAME_PREFIX}{secrets.token_hex(16)}")
    server.listen(MAX_WAITING)
    return server


def name_of(server: socket.socket) -> str:
    """The abstract name that a listening socket is bound to."""
    name: bytes = server.getsockname()
    return name.decode("ascii")


def is_name_of_rank(name: str | bytes) -> bool:
    """Whether the socket of this name is one of `listening_socket`."""
    return isinstance(name, bytes) and name.startswith(NAME_PREFIX.encode())


def connect_to(name: str) -> socket.socket:
    """A connection to the socket of this name.

    Raises:
        OSError: there is none, or it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # a rank whose queue of connections is full accepts none: it must not hold up the others for ever
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(name)
        check_user(connection)
    except OSError:
        connection.close()
        raise
    return connection


def check_user(connection: socket.socket) -> None:
    """Raise PermissionError unless the other end is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"a process of user {user} has the socket, not of {os.getuid()}")


def send_text(connection: socket.socket, text: str, *, files: Sequence[int] = ()) -> None:
    """Send a message; `files` are descriptors that the receiver gets."""
    message = text.encode()
    message = _LENGTH.pack(len(message)) + message
    if files:
        sent = socket.send_fds(connection, [message], list(files))
        # the descriptors go with the first byte; the rest may be sent in several parts
        message = message[sent:]
    connection.sendall(message)


def receive_text(connection: socket.socket, *, timeout_s: float) -> str:
    """A message without descriptors; raises as `receive_with_files`."""
    text, _ = receive_with_files(connection, timeout_s=timeout_s, most_files=0)
    return text


def receive_with_files(
    connection: socket.socket, *, timeout_s: float, most_files: int = 1
) -> tuple[str, list[int]]:
    """A message and its descriptors. Both ends take turns, so no second message follows at once.

    Raises:
        OSError: the other end has closed the connection, or is late.
    """
    connection.settimeout(timeout_s)
    received, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, most_files)
    while len(received) < _LENGTH.size or len(received) < _LENGTH.size + _length(received):
        more = connection.recv(MAX_MESSAGE_BYTES)
        if not more:
            for file in files:
                os.close(file)
            raise ConnectionResetError("a member left while the group met")
        received += more
    return received[_LENGTH.size :].decode(), files


def _length(received: bytes) -> int:
    (length,) = _LENGTH.unpack_from(received)
    return int(length)


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
            self._listener = listening_socket()
        return name_of(self._listener)

    def connect(self, names: Mapping[int, str]) -> str:
        """Connect to ranks, by the names of their sockets; why that is not possible, "" if it is."""
        for rank, name in names.items():
            if rank in self._connections:
                continue
            try:
                connection = connect_to(name)
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


MAX_MEMBERS = 256
"""Of a group in shared memory: halves of slots become small."""
LOOK_S = 0.01
SOCKET_KEY, ELSEWHERE_KEY, WIDTH_KEY = "socket", "elsewhere", "members a host"


class MeetingStore(Protocol):
    """The part of torch.distributed.Store that is used here; `get` waits for its key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


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

    def others(self, names: Mapping[int, str]) -> dict[int, str]:
        """The names of the other members, by place, under their ranks."""
        places = [place for place in range(len(self.ranks)) if place != self.index]
        return {self.ranks[place]: names[place] for place in places}


def meet(meeting: Meeting, peers: LocalPeers) -> SharedSegment | None:
    """The segment of a group; None: its members take gloo, all of them. It blocks until all members
    have come.
    """
    if meeting.index > 0:
        return _join(meeting, peers)
    # said at once: the others wait for the key and would otherwise wait for the time-out
    if not peers.identity or len(meeting.ranks) > MAX_MEMBERS:
        meeting.store.set(SOCKET_KEY, "{}")
        return None
    try:
        return _lead(meeting, peers)
    except (OSError, ValueError) as error:
        with suppress(RuntimeError):  # the store is lost: the group cannot be connected at all
            meeting.store.set(SOCKET_KEY, "{}")
        peers.note(meeting.ranks, error)
        return None


def members_a_host(meeting: Meeting, peers: LocalPeers) -> int:
    """How many members of a group each host has, the same on all, where the members of one host follow
    each other; 0 where it is otherwise, or where a host has one member. It blocks until all members
    have come.
    """
    store = meeting.store
    if meeting.index > 0:
        store.set(f"host {meeting.index}", peers.identity)
        return int(store.get(WIDTH_KEY))
    others = [store.get(f"host {index}").decode() for index in range(1, len(meeting.ranks))]
    width = equal_width([peers.identity, *others])
    store.set(WIDTH_KEY, str(width))
    return width


def equal_width(hosts: Sequence[str]) -> int:
    """Length of the runs of equal names, each of which comes once; 0 if lengths differ or are 1, or there is
    one run or an unknown host ("").
    """
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    is_known_and_once = all(hosts) and len(runs) == len(set(hosts)) > 1
    widths = {length for _, length in runs}
    return max(widths) if is_known_and_once and len(widths) == 1 and widths != {1} else 0


def all_share(meeting: Meeting, width: int, *, is_shared: bool) -> bool:
    """Whether the members on every host share memory; called by all members of a group."""
    host, place = divmod(meeting.index, width)
    if place == 0:
        meeting.store.set(f"shares {host}", str(int(is_shared)))
    num_hosts = len(meeting.ranks) // width
    return all(meeting.store.get(f"shares {other}") == b"1" for other in range(num_hosts))


def _lead(meeting: Meeting, peers: LocalPeers) -> SharedSegment | None:
    with ExitStack() as stack:
        segment_file = SharedSegment.create(len(meeting.ranks))
        stack.callback(os.close, segment_file)
        segment = SharedSegment(segment_file, len(meeting.ranks))  # before others count on it
        server = stack.enter_context(listening_socket())
        place = {"host": peers.identity, "name": name_of(server)}
        meeting.store.set(SOCKET_KEY, json.dumps(place))
        members = _accept_all(server, meeting, stack)
        if members is None:
            return None
        names = {0: peers.own_name()}
        for member in members:
            index, name = json.loads(receive_text(member, timeout_s=meeting.left_s))
            names[index] = name
        for member in members:
            send_text(member, json.dumps(names), files=(segment_file,))
        # all answers before any verdict: a single member that cannot map the memory sends all of them to gloo
        reasons = [receive_text(member, timeout_s=meeting.left_s) for member in members]
        own_reason = peers.connect(meeting.others(names))
        reason = next(filter(None, (own_reason, *reasons)), "")
        for member in members:
            send_text(member, reason)
        if reason:
            peers.note(meeting.ranks, reason)
            return None
        return segment


def _join(meeting: Meeting, peers: LocalPeers) -> SharedSegment | None:
    place = json.loads(meeting.store.get(SOCKET_KEY))
    if not peers.identity or place.get("host") != peers.identity:
        meeting.store.set(ELSEWHERE_KEY, "another host")
        return None
    try:
        leader = connect_to(place["name"])
    except OSError as error:
        meeting.store.set(ELSEWHERE_KEY, str(error))
        return None
    with leader:
        try:
            return _receive_segment(leader, meeting, peers)
        except (OSError, ValueError):
            return None  # member 0 sees the connection closed, and names the reason


def _receive_segment(
    leader: socket.socket, meeting: Meeting, peers: LocalPeers
) -> SharedSegment | None:
    send_text(leader, json.dumps([meeting.index, peers.own_name()]))
    text, files = receive_with_files(leader, timeout_s=meeting.left_s)
    if not files:
        raise OSError("the descriptor of the memory was not passed on")
    try:
        segment = SharedSegment(files[0], len(meeting.ranks))
    finally:
        for file in files:
            os.close(file)
    send_text(leader, peers.connect(meeting.others(_by_place(text))))
    is_agreed = receive_text(leader, timeout_s=meeting.left_s) == ""
    return segment if is_agreed else None


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
            check_user(connection)
            members.append(connection)
    return members


def _by_place(text: str) -> dict[int, str]:
    return {int(place): name for place, name in json.loads(text).items()}
