"""The store of a world: where its ranks find it, the keys that are theirs, and how many calls each has started.

rank 0    sets `leader` to a new nonce            waits until `joined` is size - 1      sets `go`
rank r    reads `leader`     claims `slot/r`      adds 1 to `joined`                    waits for `go`
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as find_rendezvous

from weft.comm.interfaces import LOOPBACK, listen, listen_address, listen_anywhere
from weft.comm.transport import Call
from weft.core.mesh import rank_list
from weft.errors import CommTimeout, Fault, LaunchError, first_line

NOTE_AFTER_S = 10.0
REPLACED_WAIT_S = 60.0
"""How long a rank whose slot another process holds waits for a new leader."""
MAX_NAMED_SLOTS = 4096
"""Largest world in which a time-out looks up which ranks are missing."""
FIRST_POLL_S, LONGEST_POLL_S = 0.0005, 0.02
POLL_S_PER_MEMBER = 2e-5
"""Added to the longest interval for each member of a group: 16,384 members ask 50,000 times a second
together.
"""
POLL_GROWTH = 1.3


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
    # counted by each rank for itself: all make their transports in the same order, so the numbers agree
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


@contextmanager
def late_note(text: Callable[[], str]) -> Iterator[None]:
    """While the block runs for longer than NOTE_AFTER_S, say once what it waits for.

    Args:
        text: called then, in another thread.
    """
    timer = threading.Timer(NOTE_AFTER_S, _print_note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_note(text: Callable[[], str]) -> None:
    with suppress(OSError, RuntimeError):  # stderr is closed, or the store is lost
        sys.stderr.write(f"note: {text()}\n")
        sys.stderr.flush()


# Note [Job nonce]
# A store outlives the processes that use it (the agent of torchrun keeps one over all restarts), and a process of another
# job may reach it (two jobs on one port). So the keys of a world start with a nonce that rank 0 draws; what earlier attempts
# and other jobs have written is never read. Local ranks inherit the nonce from the process that forks them, and need no
# handshake. Ranks of torchrun and Slurm find it under the name of their job (its run id, or job and step id):
#
#     another job       has another name, and so other keys
#     an earlier leader is recognised by `go`: a dead rank 0 never sets it; if it had set it, all slots of its nonce are
#                       taken. A rank that waits sees the new `leader` and claims a slot there
#     the same name     (ranks started by hand: no name at all.) A slot has one owner, by compare-and-set: the second process
#                       that claims it is rejected in one line that names the first, and changes nothing
#
# Each rank sends a constant number of requests besides polling.


def poll_intervals(num_members: int = 0) -> Iterator[float]:
    """Seconds between two looks at the store: short at first, for ranks that arrive together."""
    longest_s = LONGEST_POLL_S + POLL_S_PER_MEMBER * num_members
    interval_s = FIRST_POLL_S
    while True:
        yield interval_s
        interval_s = min(POLL_GROWTH * interval_s, longest_s)


class KeyStore(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def agree_on_namespace(store: KeyStore, rank: int, size: int, *, job: str, timeout_s: float) -> str:
    """The prefix of this world's keys; every rank calls it. See Note [Job nonce].

    Args:
        job: name of the job, equal on its ranks; "" if nothing names it.

    Raises:
        LaunchError: some ranks did not arrive, or another process is this rank.
    """
    root = f"weft/{job}" if job else "weft"
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _lead(store, root, size, deadline=deadline, timeout_s=timeout_s)
    with late_note(lambda: f"rank {rank} of {size} waits for rank 0 to start the world"):
        return _follow(store, root, rank, deadline=deadline, timeout_s=timeout_s)


def _lead(store: KeyStore, root: str, size: int, *, deadline: float, timeout_s: float) -> str:
    prefix = f"{root}/{secrets.token_hex(16)}"
    store.set(f"{root}/leader", prefix)
    with late_note(lambda: f"rank 0 waits for {_missing(store, prefix, size)} to join"):
        for interval_s in poll_intervals():
            if store.add(f"{prefix}/joined", 0) >= size - 1:
                break
            if time.monotonic() > deadline:
                raise _late(_missing(store, prefix, size), timeout_s)
            time.sleep(interval_s)
    # only now may ranks write keys: before, some could still belong to an earlier leader
    store.set(f"{prefix}/go", "1")
    return prefix


def _missing(store: KeyStore, prefix: str, size: int) -> str:
    if size > MAX_NAMED_SLOTS:
        return f"{size - 1 - store.add(f'{prefix}/joined', 0)} of {size} ranks"
    missing: list[int] = [
        rank for rank in range(1, size) if not store.check([f"{prefix}/slot/{rank}"])
    ]
    return rank_list(tuple(missing))


def _follow(store: KeyStore, root: str, rank: int, *, deadline: float, timeout_s: float) -> str:
    process = f"process {os.getpid()} on {os.uname().nodename}"
    own_name = f"{process} {secrets.token_hex(16)}"
    prefix = ""
    owner = ""
    for interval_s in poll_intervals():
        if owner == own_name and store.check([f"{prefix}/go"]):
            return prefix
        leader = _value(store, f"{root}/leader")
        if leader != prefix and not (owner == own_name and store.check([f"{prefix}/go"])):
            prefix = leader
            # the value that the slot then has, this process's name or that of the one that came first
            owner = store.compare_set(f"{prefix}/slot/{rank}", "", own_name).decode()
            if owner == own_name:
                store.add(f"{prefix}/joined", 1)
            elif not owner.startswith(process):  # this process may be a rank of an earlier world
                deadline = min(deadline, time.monotonic() + REPLACED_WAIT_S)
        if time.monotonic() > deadline:
            break
        time.sleep(interval_s)
    if owner in ("", own_name):
        raise _late("rank 0" if not owner else "some ranks", timeout_s)
    what = f"another process is rank {rank} of this job"
    got = owner.rpartition(" ")[0]
    fix = "use another port, or end that process"
    raise LaunchError(Fault("rendezvous", what, got=got, need="one process for each rank", fix=fix))


def _value(store: KeyStore, key: str) -> str:
    """The value of a key; "" if it is not set."""
    return store.get(key).decode() if store.check([key]) else ""


def _late(who: str, timeout_s: float) -> LaunchError:
    return LaunchError(Fault("rendezvous", f"{who} did not arrive within {timeout_s:g} s"))


class PresenceStore:
    """One key per group and rank: the number of calls of that group that the rank has started.

    Members of a group start its calls in the same order, so a rank has joined call n (counted from
    0) once it has started more than n calls. No method blocks inside the store: several threads
    share its one connection.
    """

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self.is_closed = False

    def announce(self, group: str, rank: int, num_started: int) -> None:
        """Let the other members of `group` see that `rank` has started this many of its calls."""
        key = _key(group, rank)
        self._store.set(key, str(num_started))

    def is_first(self, key: str) -> bool:
        """Whether this is the first rank to claim `key`."""
        return self._store.add(key, 1) == 1

    def missing(
        self, group: str, ranks: tuple[int, ...], *, num_started: int, within_s: float
    ) -> tuple[int, ...]:
        """Those of `ranks` that have not started `num_started` calls of `group` after `within_s`,
        sooner if all have.

        None are missing if the store itself is lost.
        """
        deadline_s = time.monotonic() + within_s
        missing = ranks
        try:
            for interval_s in poll_intervals(len(ranks)):
                still_missing = [
                    rank for rank in missing if self._num_started(group, rank) < num_started
                ]
                missing = tuple(still_missing)
                is_over = self.is_closed or time.monotonic() > deadline_s
                if not missing or is_over:
                    break
                time.sleep(interval_s)
        except RuntimeError:
            return ()
        return missing

    def wait_for_members(self, group: str, call: Call, *, timeout_s: float) -> None:
        """Announce the first call of this rank and return when every member of `call` has announced
        one.

        Each member counts itself and the last one sets a key: the requests of a rank do not grow
        with the group. Only after a time-out it asks for every member.

        Raises:
            CommTimeout: naming those that have not.
        """
        self.announce(group, call.rank, 1)
        num_members = len(call.ranks)
        complete_key = f"{group}/complete"
        # the counter is never reset: groups meet once under a name
        if self._store.add(f"{group}/arrived", 1) == num_members:
            self._store.set(complete_key, "1")
        deadline_s = time.monotonic() + timeout_s
        for interval_s in poll_intervals(num_members):
            if self._store.check([complete_key]):
                return
            if self.is_closed or time.monotonic() > deadline_s:
                break
            time.sleep(interval_s)
        missing = self.missing(group, call.ranks, num_started=1, within_s=0.0)
        if missing:
            late = f"{rank_list(missing)} did not arrive within {timeout_s:g} s"
            raise CommTimeout(f"{call.description}: {late}")

    def _num_started(self, group: str, rank: int) -> int:
        key = _key(group, rank)
        is_announced = self._store.check([key])
        if not is_announced:
            return 0
        number = self._store.get(key)
        return int(number)


def _key(group: str, rank: int) -> str:
    return f"{group}/{rank}"
