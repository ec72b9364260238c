"""File systems of fsspec behind URLs: the extras that install them, and how long requests to them wait. fsspec is imported late.

Note [Time limits of stores]
    A store that accepts connections and answers nothing held a run for four minutes: botocore waits
    60 s for a read and asks five times, s3fs five times again, and weft repeats what fails, too. With
    the limits below that takes one minute. Values of fsspec's own config files stay.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

EXTRAS: Mapping[str, str] = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hub"}
"""Protocol -> extra of this package that installs its file system."""
S3 = ("s3", "s3a")
S3_LIMITS: Mapping[str, Any] = {
    "connect_timeout": 10,  # s
    "read_timeout": 30,  # s without a byte
    "retries": {"max_attempts": 0},
}
"""Of botocore."""
S3_ATTEMPTS = 2
"""Of s3fs for each request."""


def open_file_system(url: str, **options: object) -> tuple[Any, str]:
    """The file system of a URL, and the path within it; see Note [Time limits of stores].

    Args:
        options: of fsspec.

    Raises:
        ImportError: fsspec or the package of the file system is not installed.
        ValueError: fsspec knows no such protocol.
    """
    core = importlib.import_module("fsspec.core")
    is_s3 = url.partition("://")[0] in S3
    if is_s3:
        options["config_kwargs"] = {**S3_LIMITS, **_configured_limits()}
    fs, path = core.url_to_fs(url, **options)
    if is_s3:
        fs.retries = S3_ATTEMPTS
    return fs, path


def _configured_limits() -> Mapping[str, Any]:
    """What fsspec's config files or variables say for S3."""
    config = importlib.import_module("fsspec.config").conf
    found: Mapping[str, Any] = config.get("s3", {}).get("config_kwargs", {})
    return found
