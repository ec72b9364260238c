"""The store of a world: found by its rendezvous (env://, tcp://, file://), its namespaces, and one that polls."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as find_rendezvous

from weft.comm.interfaces import LOOPBACK, listen, listen_address, listen_anywhere
from weft.comm.store_keys import PresenceStore, late_note, poll_intervals
from weft.errors import CommTimeout, Fault, LaunchError, first_line


def find_store(
    rendezvous: str | Store, rank: int, size: int, *, timeout_s: float, listener: int | None
) -> Store:
    """The store of a world; arguments as of `ProcessTransport`.

    Raises:
        LaunchError: it cannot be reached, or opened.
    """
    if isinstance(rendezvous, Store):
        return rendezvous
    timeout = timedelta(seconds=timeout_s)
    try:
        url = _without_agent(rendezvous)
        if url.startswith("tcp:"):
            return _tcp_store(url, rank, timeout=timeout, listener=listener)
        found = next(find_rendezvous(url, rank, size, timeout=timeout))
    except (ValueError, RuntimeError, OSError) as error:
        reason = first_line(error)
        what = f"rank {rank} of {size} cannot meet the others at {rendezvous}"
        raise LaunchError(Fault("rendezvous", what, got=reason)) from error
    store = found[0]
    return cast(Store, store)


def _without_agent(url: str) -> str:
    """`tcp://host:port` for the variables that were set by hand, where no agent has a store."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if url != "env://" or has_agent or not host or not port:
        return url
    is_ipv6 = ":" in host
    if is_ipv6:
        host = f"[{host}]"
    return f"tcp://{host}:{port}"


def _tcp_store(url: str, rank: int, *, timeout: timedelta, listener: int | None) -> Store:
    """The store at `tcp://host:port`: rank 0 listens, on one address; see `weft.comm.interfaces`."""
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port
    if not host or port is None:
        raise ValueError(f"{url} names no host and port")
    if rank > 0:
        with late_note(lambda: f"rank {rank} waits for rank 0 to listen at {host}:{port}"):
            return TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    if listener is None:
        address = listen_address(host, port)
        listening = listen(address, port) if address else listen_anywhere(port)
        file = listening.detach()
    else:
        file = os.dup(listener)
        address = host
    return TCPStore(
        address or LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=file,
    )


def next_namespace(store: Store, rank: int, nonce: str) -> Store:
    """Keys of this transport alone in a store of this world: a second transport starts afresh."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    root = f"weft/{nonce or attempt}"
    generation = store.add(f"{root}/joined/{rank}", 1)
    return PrefixStore(f"{root}/{generation}", store)


class PollingStore(Store):
    """A store that polls instead of blocking: a group that connects must not hold up the store's
    other users.
    """

    def __init__(self, store: Store, presence: PresenceStore, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._presence = presence
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s
        if timeout is not None:
            timeout_s = timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        for interval_s in poll_intervals():
            if self._store.check(keys):
                return
            if time.monotonic() > deadline_s or self._presence.is_closed:
                raise CommTimeout(
                    f"a member of the group left while it was being connected; missing {keys}"
                )
            time.sleep(interval_s)
