"""The web application of `weft dash`: pages and server-sent events, for one user of this machine, read-only."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as EventStream
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import Server

from weft.commands.dash_runs import FollowedRuns
from weft.commands.report_page import MAX_RUNS
from weft.commands.runs import KEYS, Column
from weft.errors import UserError
from weft.report.page import live_policy

HOST = "127.0.0.1"
POLL_S = 1.0
"""Between two looks for one open page."""
QUIET_S = 15.0
"""After so long a stream without news sends a comment, so that a closed connection is found."""
MOST_CONNECTIONS = 64
LAST_S = 3
"""At the end, requests that are being answered may take so long."""
PAGES = ("/", "/report")
"""Addresses that take the token, and are left without it."""
DEFAULT_SORT: Column = "age"
HEADERS = {
    "content-security-policy": f"{live_policy()}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""


@dataclass
class Dashboard:
    """The pages, and the end of their streams.

    Attributes:
        closing: set when the server ends.
    """

    runs: FollowedRuns
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_page(self, request: Request) -> Response:
        """All runs."""
        name = request.query_params.get("sort", DEFAULT_SORT)
        sort = next((column for column in KEYS if column == name), None)
        if sort is None:
            return PlainTextResponse("sort: is no column\n", 400)
        return HTMLResponse(await run_in_threadpool(self.runs.list_page, sort))

    async def report_page(self, request: Request) -> Response:
        """One run, or several over each other; without any, the list."""
        keys = _keys(request)
        if not keys:
            return RedirectResponse("/", 303)
        if len(keys) > MAX_RUNS:
            return PlainTextResponse(f"one page shows at most {MAX_RUNS} runs\n", 400)
        try:
            return HTMLResponse(await run_in_threadpool(self.runs.runs_page, keys))
        except UserError as error:
            return _rejected(error)

    async def changes(self, request: Request) -> Response:
        """Server-sent events: the version of the list, or of the page of some runs, as it changes."""
        keys = _keys(request)
        try:
            version = await self._version(keys)
        except UserError as error:
            return _rejected(error)
        return EventStream(self._changes(keys, version), media_type="text/event-stream")

    async def _changes(self, keys: tuple[str, ...], version: str) -> AsyncIterator[str]:
        yield _change(version)
        quiet_s = 0.0
        while not await self._is_closing():
            quiet_s += POLL_S
            try:
                newest = await self._version(keys)
            except UserError:  # the run was removed
                return
            if newest != version:
                version, quiet_s = newest, 0.0
                yield _change(version)
            elif quiet_s >= QUIET_S:
                quiet_s = 0.0
                yield ": no change\n\n"

    async def _version(self, keys: tuple[str, ...]) -> str:
        look = partial(self.runs.runs_version, keys) if keys else self.runs.list_version
        version: str = await run_in_threadpool(look)
        return version

    async def _is_closing(self) -> bool:
        """Wait for the next look, or for the end."""
        try:
            await asyncio.wait_for(self.closing.wait(), POLL_S)
        except TimeoutError:
            return False
        return True


def _keys(request: Request) -> tuple[str, ...]:
    return tuple(dict.fromkeys(request.query_params.getlist("run")))[: MAX_RUNS + 1]


def _change(version: str) -> str:
    return f"event: change\ndata: {version}\n\n"


def _rejected(error: UserError) -> Response:
    return PlainTextResponse("".join(f"{fault}\n" for fault in error.faults), 404)


@dataclass(frozen=True)
class Guard:
    """Rejects what does not come from the browser of the user who has started the server.

    Attributes:
        hosts: values of the Host header that are served; a name that others point to this machine
            (DNS rebinding) is none of them.
    """

    app: ASGIApp
    hosts: frozenset[str]
    token: str
    cookie: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with the headers of every answer."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        answer = self._rejection(request) or self._entry(request) or self.app
        await answer(scope, receive, _with_headers(send))

    def _rejection(self, request: Request) -> Response | None:
        """Why a request is not served; None: it is."""
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return PlainTextResponse("the Host header names another server\n", 403)
        if request.method != "GET":
            return PlainTextResponse("only GET is served\n", 405, {"allow": "GET"})
        given = request.query_params.getlist("token") or [request.cookies.get(self.cookie, "")]
        if not all(hmac.compare_digest(each.encode(), self.token.encode()) for each in given):
            text = "the token is missing or wrong: open the address that was printed\n"
            return PlainTextResponse(text, 403)
        return None

    def _entry(self, request: Request) -> Response | None:
        """A request with the token gets a cookie in its place: the address is shown and stored no
        longer with it.
        """
        if "token" not in request.query_params or request.url.path not in PAGES:
            return None
        url = request.url.remove_query_params("token")
        answer = RedirectResponse(f"{url.path}?{url.query}" if url.query else url.path, 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return answer


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *own]}
        await send(message)

    return send_with_headers


class DashServer(Server):
    """A server on a socket that listens on loopback; a signal ends its open streams at once."""

    def __init__(self, runs: FollowedRuns, listener: socket.socket, *, token: str) -> None:
        port = listener.getsockname()[1]
        self.listener, self.dashboard = listener, Dashboard(runs)
        self.address = f"http://{HOST}:{port}/?token={token}"
        routes = [
            Route("/", self.dashboard.list_page),
            Route("/report", self.dashboard.report_page),
            Route("/changes", self.dashboard.changes),
        ]
        hosts = frozenset({f"{HOST}:{port}", f"localhost:{port}"})
        app = Guard(Starlette(routes=routes), hosts, token, f"weft_dash_{port}")
        super().__init__(
            Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=LAST_S,
            )
        )

    def serve_until_signal(self) -> None:
        """Serve; a signal is raised again when all connections are closed."""
        self.run(sockets=[self.listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the server."""
        self.dashboard.closing.set()
        await super().shutdown(sockets)
