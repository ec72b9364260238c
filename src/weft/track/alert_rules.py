"""Which events of a run are passed on at once, how often, and as what; and what is wrong with where they go. No torch."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from weft.code.trust import TRUST_FLAG, is_text_trusted
from weft.config.alert_keys import IN_VARIABLE, URL, expanded, variables_of
from weft.config.schema import AlertConfig
from weft.errors import Fault
from weft.view.progress import event_text
from weft.view.quantity import clock

Event = Mapping[str, Any]

COMMAND = "alert.command"
KINDS = ("guard", "restart")
"""Kinds of events that are passed on when they happen; an `end` event is when the run has ended."""
MIN_INTERVAL_S = 60.0
"""Between two events of one kind."""


@dataclass
class AlertLimit:
    """At most one alert a minute of each kind; those between are counted.

    Attributes:
        last_s: kind -> time of its last alert.
        dropped: kind -> events since then that were not passed on.
    """

    last_s: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def admits(self, event: Event, *, now_s: float) -> bool:
        """Whether an event is passed on now."""
        kind = kind_of(event)
        last_s = self.last_s.get(kind)
        if last_s is not None and now_s - last_s < MIN_INTERVAL_S:
            self.dropped[kind] = self.dropped.get(kind, 0) + 1
            return False
        self.last_s[kind] = now_s
        return True

    def take_dropped(self, event: Event) -> int:
        """How many events of this kind were not passed on before it."""
        return self.dropped.pop(kind_of(event), 0)


def kind_of(event: Event) -> str:
    """Guards of different kinds are kinds of their own."""
    return f"{event.get('event')} {event.get('kind', '')}".strip()


def payload(event: Event, *, run: str, dropped: int) -> str:
    """The JSON that a command and a URL get: the event, with the run, the machine and a line of text."""
    fields = {**event, "run": run, "host": socket.gethostname()}
    if dropped:
        fields["not_passed_on"] = dropped
    fields["text"] = f"{run}: {_text(event)}"
    return json.dumps(fields, ensure_ascii=False)


def _text(event: Event) -> str:
    if event.get("event") != "end":
        return event_text(event)
    steps, seconds = event.get("steps", 0), event.get("seconds", 0.0)
    parts = [f"{event.get('status')} after step {steps}, {clock(float(seconds))}"]
    why = str(event.get("error") or event.get("text") or "").strip()
    return ": ".join((*parts, *filter(None, [why])))


# -- where they go -------------------------------------------------------------------------------


def alert_faults(alert: AlertConfig, environ: Mapping[str, str]) -> Iterator[Fault]:
    """What is wrong with the command and the URL of a run, without running or asking them. No fault
    shows a URL, which may hold a secret.
    """
    if alert.command is not None:
        yield from _trust_faults(COMMAND, alert.command, environ)
        yield from _command_faults(alert.command)
    if alert.url is not None:
        yield from _trust_faults(URL, alert.url, environ)
        yield from _url_faults(alert.url, environ)


def _trust_faults(key: str, text: str, environ: Mapping[str, str]) -> Iterator[Fault]:
    if not is_text_trusted(key, text, environ):
        what = "is set by a stored file alone, and you have not used it on this machine"
        fix = f"read it in that file, then repeat the command with {TRUST_FLAG}, or name it by --{key}"
        yield Fault(key, what, fix=fix)


def _command_faults(command: str) -> Iterator[Fault]:
    example = f'--{COMMAND} "notify-send training"'
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Fault(COMMAND, "cannot be read", got=f"{command!r}: {error}", fix=example)
        return
    if not words:
        yield Fault(COMMAND, "is empty", fix=example)
    elif shutil.which(words[0]) is None:
        fix = "check its name; it is run without a shell: a pipe needs a script"
        yield Fault(COMMAND, "no such program", got=repr(words[0]), fix=fix)


def _url_faults(url: str, environ: Mapping[str, str]) -> Iterator[Fault]:
    """No address, or a variable without a value."""
    missing = [name for name in variables_of(url) if not environ.get(name)]
    if missing:
        fix = f"export {missing[0]}=..., as the URL or the part of it that is secret"
        yield Fault(URL, "names a variable that is not set", got=f"${missing[0]}", fix=fix)
        return
    try:
        parts = urlsplit(expanded(url, environ))
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not expanded(url, environ).isprintable():
        need = "http://HOST/PATH or https://HOST/PATH"
        yield Fault(URL, "is no URL that takes a POST", need=need, fix=IN_VARIABLE)
