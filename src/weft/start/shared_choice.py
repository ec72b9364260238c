"""One choice for all ranks of torchrun or Slurm: rank 0 makes it, the others read it, or its error, from a store.

Ranks that the agent of torchrun has started find its store before they have any communicator, and it
outlives them. Under Slurm rank 0 opens a store for the choice, at a port of its own, and keeps it
until all others have read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from weft.comm.world_store import KeyStore, agree_on_namespace, find_store, poll_intervals
from weft.errors import (
    ConfigError,
    Fault,
    LaunchError,
    MeshError,
    PlanError,
    UserError,
    type_and_message,
)
from weft.run.world import World

ENV = "env://"
AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
ARRIVAL_S = 600.0
"""Seconds within which all ranks arrive."""
CHOICE_S = 1800.0
"""Seconds for which ranks wait for the choice of rank 0."""
READ_S = 60.0
"""Seconds for which rank 0 keeps a store of its own for ranks that have not read yet."""
CHOICE_PORTS = range(30_000, 32_500)
"""Ports of such stores: below Linux's range for outgoing connections, beside those of jobs."""
ERRORS: Mapping[str, type[UserError]] = {
    error.__name__: error for error in (ConfigError, LaunchError, MeshError, PlanError, UserError)
}
"""Errors that keep their type on the other ranks."""

Values = dict[str, Any]
MESH = "mesh"


def shared_store(world: World, *, key: str = MESH) -> KeyStore | None:
    """The store for the choice of a world; None where every rank must choose by itself: variables of
    torchrun that were set by hand, and a world of one rank.

    Raises:
        LaunchError: the store cannot be reached, or opened.
    """
    url = _store_url(world, key)
    if url is None:
        return None
    return find_store(url, world.rank, world.size, timeout_s=ARRIVAL_S, listener=None)


def ends_with_rank_0(world: World) -> bool:
    """Whether the store of a world is rank 0's own."""
    return world.rendezvous != ENV


def _store_url(world: World, key: str) -> str | None:
    """Where the store of a choice is; None: there is none."""
    if world.size == 1 or not isinstance(world.rendezvous, str):
        return None
    if world.rendezvous == ENV:
        return ENV if os.environ.get(AGENT_VARIABLE) == "True" else None
    address = urlsplit(world.rendezvous)
    if address.scheme != "tcp" or address.port is None:
        return None
    number = address.port + (key != MESH)  # rank 0 may still have the store of the mesh open
    port = CHOICE_PORTS[number % len(CHOICE_PORTS)]
    host, _, _ = address.netloc.rpartition(":")
    return f"tcp://{host}:{port}"


def choose_once(
    choose: Callable[[], Values],
    store: KeyStore,
    world: World,
    *,
    key: str = MESH,
    arrival_s: float = ARRIVAL_S,
    choice_s: float = CHOICE_S,
) -> Values:
    """What `choose` returns on rank 0; every rank of the world calls it.

    Args:
        choose: its values can be written as JSON.
        key: of the config, that is chosen.
        arrival_s: for all ranks to arrive.
        choice_s: for the choice.

    Raises:
        UserError: that of rank 0, with its faults and its type where it is in `ERRORS`.
        LaunchError: ranks did not arrive, or rank 0 has not chosen in time.
    """
    job = f"{world.job}/choice/{key}"
    prefix = agree_on_namespace(store, world.rank, world.size, job=job, timeout_s=arrival_s)
    chosen = f"{prefix}/chosen"
    readers = f"{prefix}/readers"
    if world.rank == 0:
        try:
            return _chosen_here(choose, store, chosen, key=key)
        finally:
            if ends_with_rank_0(world):
                _wait_for_readers(store, readers, world.size - 1)
    text = _awaited(store, chosen, key=key, choice_s=choice_s)
    store.add(readers, 1)
    return _read(text)


def _wait_for_readers(store: KeyStore, key: str, number: int) -> None:
    """Return when so many ranks have read, or after `READ_S`."""
    deadline = time.monotonic() + READ_S
    for interval_s in poll_intervals():
        if store.add(key, 0) >= number or time.monotonic() > deadline:
            return
        time.sleep(interval_s)


def _chosen_here(choose: Callable[[], Values], store: KeyStore, chosen: str, *, key: str) -> Values:
    """Make the choice, and write it, or its error, for the other ranks."""
    try:
        values = choose()
    except UserError as error:
        faults = [asdict(fault) for fault in error.faults]
        _write(store, chosen, {"error": type(error).__name__, "faults": faults})
        raise
    except Exception as error:
        what = "rank 0, which chooses for all ranks, has failed"
        fault = Fault(key, what, got=type_and_message(error))
        _write(store, chosen, {"error": LaunchError.__name__, "faults": [asdict(fault)]})
        raise
    _write(store, chosen, {"values": values})
    return values


def _write(store: KeyStore, key: str, answer: Values) -> None:
    store.set(key, json.dumps(answer))


def _awaited(store: KeyStore, chosen: str, *, key: str, choice_s: float) -> str:
    """The text of the choice of a key of the config, once it is set."""
    deadline = time.monotonic() + choice_s
    for interval_s in poll_intervals():
        if store.check([chosen]):
            return store.get(chosen).decode()
        if time.monotonic() > deadline:
            break
        time.sleep(interval_s)
    what = f"rank 0 has not chosen within {choice_s:g} s"
    fix = "name a mesh: --mesh dp2" if key == MESH else f"give {key} a value"
    raise LaunchError(Fault(key, what, fix=fix))


def _read(text: str) -> Values:
    """The values of an answer.

    Raises:
        UserError: of rank 0.
    """
    answer: Values = json.loads(text)
    if "error" not in answer:
        values: Values = answer["values"]
        return values
    faults = [Fault(**fields) for fields in answer["faults"]]
    error = ERRORS.get(answer["error"], UserError)
    raise error(*faults)
