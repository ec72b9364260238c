"""The URL of alerts, and the variables in it, whose values are not stored. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

URL = "alert.url"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)
IN_VARIABLE = "--alert.url '$ALERT_URL', with the whole URL in that environment variable"


def expanded(url: str, environ: Mapping[str, str]) -> str:
    """A URL with the values of its variables."""
    return VARIABLE.sub(lambda found: environ.get(found[1] or found[2], ""), url)


def variables_of(url: str) -> list[str]:
    """The names of the variables in a URL."""
    return [braced or plain for braced, plain in VARIABLE.findall(url)]
