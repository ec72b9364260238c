"""`weft dash`: the list and the pages of runs in the browser, live, on this machine alone. Imports no torch."""

from __future__ import annotations

import importlib.util
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.commands.runs import DEFAULT_FOLDER
from weft.config.command_options import read_options
from weft.config.schema import ConfigSection
from weft.errors import EXIT_OK, Fault, UserError

NAME = "weft dash"
USAGE = "[FOLDER] [--port 8787]"
LINE = "watch runs in the browser: the list and the pages, live"
PACKAGES = ("starlette", "uvicorn")
LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 8787, 20
"""Ports that are tried without `--port`; then any that is free."""
TOKEN_BYTES = 32
BACKLOG = 64


class DashOptions(ConfigSection):
    """Where `weft dash` listens: on the loopback address, nowhere else."""

    port: int | None = Field(
        None, ge=1, le=65535, description=f"the port; None: a free one from {FIRST_PORT} on"
    )


def dash(words: Sequence[str]) -> int:
    """Serve the runs below a folder until Ctrl-C.

    Raises:
        UserError: there is no such folder, a package is missing, or the port is taken.
    """
    if wants_help(words):
        return show_help(DashOptions(), f"{NAME} {USAGE}", LINE)
    options, places = read_options(words, DashOptions)
    root = _folder(places)
    _check_packages()
    from weft.commands.dash_app import DashServer  # late: an extra
    from weft.commands.dash_runs import FollowedRuns

    with _listener(options.port) as listener:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        server = DashServer(FollowedRuns(root), listener, token=token)
        print_result(f"{server.address}\nthe runs below {root}; Ctrl-C ends")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.serve_until_signal()
    return EXIT_OK


def _folder(places: Sequence[str]) -> Path:
    if len(places) > 1:
        got = " ".join(places)
        raise UserError(Fault(NAME, "takes one folder", got=got, fix="weft dash runs"))
    root = Path(places[0] if places else DEFAULT_FOLDER).expanduser()
    if not root.is_dir():
        fix = "weft dash FOLDER, or start a run: weft train --steps 20"
        raise UserError(Fault(NAME, "there is no such folder", got=repr(str(root)), fix=fix))
    return root


def _check_packages() -> None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            fix = "pip install 'weft-train[dash]'"
            raise UserError(Fault(NAME, f"{package} is not installed", fix=fix))


def _listener(port: int | None) -> socket.socket:
    """A socket that listens on loopback.

    Raises:
        UserError: the port is taken.
    """
    reason = ""
    for candidate in _ports(port):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # right after another server
        try:
            listener.bind((LOOPBACK, candidate))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
        else:
            return listener
    fix = "another --port, or none: then a free one is taken"
    raise UserError(Fault("port", f"cannot be used: {reason}", got=str(port), fix=fix))


def _ports(port: int | None) -> Iterator[int]:
    if port is not None:
        yield port
        return
    yield from range(FIRST_PORT, FIRST_PORT + NUM_PORTS)
    yield 0
