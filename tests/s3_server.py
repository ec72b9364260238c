"""An S3 server (moto) in a thread of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SECRET = "canary-secret-canary"


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The server, and a file system with an empty bucket; programs find both by their environment."""
    s3fs = pytest.importorskip("s3fs", reason="needs weft-train[s3-test]")
    moto = pytest.importorskip("moto.server", reason="needs weft-train[s3-test]")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.makedirs("bucket", exist_ok=True)
    yield server, fs
    server.stop()
