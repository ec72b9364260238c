"""Unix sockets with abstract names: listening, connecting, and messages that carry file descriptors."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence

NAME_PREFIX = "\0weft-"
"""Of the abstract names of sockets."""
MAX_MESSAGE_BYTES = 2**20
MAX_WAITING = 4096
"""Connections that wait in the queue of a socket; the kernel may allow fewer."""
CONNECT_S = 5.0
_LENGTH = struct.Struct("<I")
"""Before the text of a message. The descriptors travel with its first byte."""


def listen() -> socket.socket:
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
    """Whether the socket of this name is one of `listen`."""
    return isinstance(name, bytes) and name.startswith(NAME_PREFIX.encode())


def connect(name: str) -> socket.socket:
    """A connection to the socket of this name.

    Raises:
        OSError: there is none, or it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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


def send(connection: socket.socket, text: str, *, files: Sequence[int] = ()) -> None:
    """Send a message; `files` are descriptors that the receiver gets."""
    message = text.encode()
    message = _LENGTH.pack(len(message)) + message
    if files:
        sent = socket.send_fds(connection, [message], list(files))
        message = message[sent:]
    connection.sendall(message)


def receive(connection: socket.socket, *, timeout_s: float) -> str:
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
