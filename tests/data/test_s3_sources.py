"""Runs on data in an S3 server (moto): equal to those on the files, killed and resumed, without their server."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import s3_server
from tests.tiny_run import MODEL
from weft.data import streams
from weft.data.prepare import PrepareOptions, prepare
from weft.data.streams import source_files
from weft.errors import EXIT_OK, EXIT_USER, DataError
from weft.train.event_lines import step_history

WORDS = ("--data.seq_len", "32", "--batch.global_size", "4", "--optim.decay", "constant")
RUN = (*WORDS, "--prove.before", "never", "--mesh", "dp2", "--save.every", "10", "--steps", "60")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A server and its file system; texts, rows and a prepared folder in its bucket and on the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    lines = [f"line {number} of a text\n" * 20 for number in range(40)]
    for folder in ("texts", "rows"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("".join(lines[number::3]))
        rows = (json.dumps({"text": line}) for line in lines[number::5])
        (tmp_path / "rows" / f"{number}.jsonl").write_text("\n".join(rows))
    prepare(PrepareOptions(("texts",), split_on="blank", valid=0.0), Path("prepared"))
    with s3_server(monkeypatch) as (server, fs):
        for folder in ("texts", "rows", "prepared"):
            fs.put(f"{folder}/", f"bucket/{folder}/", recursive=True)
        yield server, fs


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "weft", "train", *words]


def losses(folder: str) -> list[float]:
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    return [event["loss"] for event in step_history([json.loads(line) for line in lines])]


def mixed(texts: str, rows: str, prepared: str) -> tuple[str, ...]:
    return ("--data.mix", f"{texts}=0.5", f"{rows}=0.3", f"{prepared}=0.2")


@pytest.mark.usefixtures("store")
def test_a_run_that_is_killed_resumes_with_the_losses_of_the_files() -> None:
    local = mixed("texts/*.txt", "rows/*.jsonl", "prepared")
    subprocess.run(command(*MODEL, *RUN, *local, "--out", "local"), check=True)
    remote = mixed("s3://bucket/texts/*.txt", "rows/*.jsonl", "s3://bucket/prepared")
    words = command(*MODEL, *RUN, *remote, "--out", "killed")
    with subprocess.Popen(words, start_new_session=True) as process:
        while process.poll() is None and not Path("killed/ckpt/step-000020").exists():
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    resumed = subprocess.run(command("killed/run.toml", "--resume", "auto"), check=False)
    assert resumed.returncode == EXIT_OK
    assert losses("killed") == losses("local")
    assert len(losses("local")) == 60


@pytest.mark.parametrize(
    ("source", "environ", "message"),
    [
        ("s3://bucket/nothing", {}, "FileNotFoundError"),
        ("s3://nowhere/texts", {}, "FileNotFoundError"),
        ("s3://bucket/texts/*.md", {}, "no file matches"),
        ("s3://bucket/rows/*", {"AWS_ACCESS_KEY_ID": ""}, "NoCredentialsError"),
        ("s3://bucket/rows/*", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "EndpointConnection"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_cannot_be_read_is_one_line(
    source: str, environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environ.get("AWS_ACCESS_KEY_ID") == "":
        environ = {**environ, "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    environ = {**os.environ, "HOME": str(Path.cwd()), "AWS_MAX_ATTEMPTS": "1", **environ}
    words = command(*MODEL, *RUN, "--data.source", source, "--out", "run")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_USER
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: data.source: ")
    assert message in line


def test_a_download_continues_when_its_server_is_back(
    store: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a line that says that it was gone; a text that has changed is downloaded anew."""
    _, fs = store
    text = bytes(range(256)) * 4000
    fs.pipe("bucket/long.txt", text)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(streams, "PAUSE_S", 0.001)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(streams, "REQUEST_BYTES", 2**18)
    file = importlib.import_module("s3fs.core").S3File
    fetch = file._fetch_range
    starts: list[int] = []

    def fetch_or_fail(self: Any, start: int, end: int) -> Any:
        starts.append(start)
        if len(starts) in range(3, 9):
            raise ConnectionError("the server is gone")
        return fetch(self, start, end)

    monkeypatch.setattr(file, "_fetch_range", fetch_or_fail)
    with pytest.raises(DataError, match="the server is gone, 5 times in a row"):
        source_files("s3://bucket/long.txt")
    assert source_files("s3://bucket/long.txt")[0].read_bytes() == text
    assert starts[2:9] == [starts[2]] * 7
    assert starts[2] > 0
    fs.pipe("bucket/long.txt", text[::-1])
    type(fs).clear_instance_cache()
    assert source_files("s3://bucket/long.txt")[0].read_bytes() == text[::-1]
