"""The URL of alerts: variables in it, which are not stored, and literal parts that may be secrets. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from weft.config.schema import AlertConfig
from weft.errors import Fault

URL = "alert.url"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)
LONG_PART = 16
"""Characters of a part of a path from which on it may be a secret, as in the addresses of web hooks."""
IN_VARIABLE = "--alert.url '$ALERT_URL', with the whole URL in that environment variable"


def expanded(url: str, environ: Mapping[str, str]) -> str:
    """A URL with the values of its variables."""
    return VARIABLE.sub(lambda found: environ.get(found[1] or found[2], ""), url)


def variables_of(url: str) -> list[str]:
    """The names of the variables in a URL."""
    return [braced or plain for braced, plain in VARIABLE.findall(url)]


def secret_faults(alert: AlertConfig) -> Iterator[Fault]:
    """What may be a secret in the literal parts of the URL: it would be stored with the run. The
    fault does not show it.
    """
    what = _secret_in(VARIABLE.sub("", alert.url or ""))
    if what:
        yield Fault(URL, f"{what}, and would be written into run.toml", fix=IN_VARIABLE)


def _secret_in(literal: str) -> str:
    """What may be a secret in the parts of a URL that are no variables; "" for nothing."""
    address, _, query = literal.partition("?")
    place = address.partition("://")[2]
    host, _, path = place.partition("/")
    if "@" in host:
        return "holds a user or password"
    if query or "#" in address:
        return "has a query, which may hold a secret"
    if any(len(part) >= LONG_PART for part in path.split("/")):
        return f"has a part of {LONG_PART} or more characters, which may be a secret"
    return ""
