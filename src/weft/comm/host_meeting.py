"""How the members of a group find out whether they share a host, and get one segment of memory.

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
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from weft.comm import unix_sockets
from weft.comm.local_peers import LocalPeers
from weft.comm.shared_memory import SharedSegment

MAX_MEMBERS = 256
"""Of a group in shared memory: halves of slots become small."""
LOOK_S = 0.01
SOCKET_KEY, ELSEWHERE_KEY = "socket", "elsewhere"


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


def _lead(meeting: Meeting, peers: LocalPeers) -> SharedSegment | None:
    with ExitStack() as stack:
        segment_file = SharedSegment.create(len(meeting.ranks))
        stack.callback(os.close, segment_file)
        segment = SharedSegment(segment_file, len(meeting.ranks))  # before others count on it
        server = stack.enter_context(unix_sockets.listen())
        place = {"host": peers.identity, "name": unix_sockets.name_of(server)}
        meeting.store.set(SOCKET_KEY, json.dumps(place))
        members = _accept_all(server, meeting, stack)
        if members is None:
            return None
        names = {0: peers.own_name()}
        for member in members:
            index, name = json.loads(unix_sockets.receive(member, timeout_s=meeting.left_s))
            names[index] = name
        for member in members:
            unix_sockets.send(member, json.dumps(names), files=(segment_file,))
        reasons = [unix_sockets.receive(member, timeout_s=meeting.left_s) for member in members]
        own_reason = peers.connect(meeting.others(names))
        reason = next(filter(None, (own_reason, *reasons)), "")
        for member in members:
            unix_sockets.send(member, reason)
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
        leader = unix_sockets.connect(place["name"])
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
    unix_sockets.send(leader, json.dumps([meeting.index, peers.own_name()]))
    text, files = unix_sockets.receive_with_files(leader, timeout_s=meeting.left_s)
    if not files:
        raise OSError("the descriptor of the memory was not passed on")
    try:
        segment = SharedSegment(files[0], len(meeting.ranks))
    finally:
        for file in files:
            os.close(file)
    unix_sockets.send(leader, peers.connect(meeting.others(_by_place(text))))
    is_agreed = unix_sockets.receive(leader, timeout_s=meeting.left_s) == ""
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
            unix_sockets.check_user(connection)
            members.append(connection)
    return members


def _by_place(text: str) -> dict[int, str]:
    return {int(place): name for place, name in json.loads(text).items()}
