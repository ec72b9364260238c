"""Copies of checkpoints in an S3 server (moto): a failed run uploads its checkpoints and resumes on another layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import SECRET, s3_server
from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER
from weft.train.event_lines import step_history

URL = "s3://bucket/run"
FAIL_IN_STEP_3 = """
from weft.train.step import TrainStep
call = TrainStep.__call__

def fail(self, *words, **options):
    fail.num_calls += 1
    if fail.num_calls == 3 and self.model.comm.rank == 1:
        raise ValueError("no third step")
    return call(self, *words, **options)

fail.num_calls = 0
TrainStep.__call__ = fail
"""
MAIN = "import sys; from weft.cli import main; sys.exit(main())"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Bucket:
    """An S3 server on this machine with one bucket, and runs that copy into it."""

    fs: Any
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def train(
        self, host: str, *words: str, program: str = "", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """`weft train` on a host with a disk of its own."""
        here = self.folder / host
        here.mkdir(exist_ok=True)
        size = ("--batch.global_size", "4", "--optim.decay", "constant", "--prove.before", "never")
        where = ("--data.source", str(self.folder / "text.txt"), "--out", URL)
        command = ("train", *MODEL, *SEQUENCES, *size, *where, "--save.every", "1", *words)
        return subprocess.run(
            [sys.executable, "-c", program + MAIN, *command],
            cwd=here,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    def events(self) -> list[dict[str, Any]]:
        """The events in the bucket."""
        self.fs.invalidate_cache()
        lines = self.fs.cat_file("bucket/run/events.jsonl").decode().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self) -> list[float]:
        """The losses of the steps in the bucket."""
        return [event["loss"] for event in step_history(self.events())]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with s3_server(monkeypatch) as (_, fs):
        write_text(tmp_path)
        yield Bucket(fs, tmp_path, dict(os.environ))


def test_a_failed_run_resumes_from_s3_on_another_layout_with_the_losses_of_one_that_did_not(
    bucket: Bucket,
) -> None:
    words = ("--mesh", "dp2", "--run.restarts", "0")
    failed = bucket.train("first", *words, "--steps", "4", program=FAIL_IN_STEP_3)
    assert failed.returncode == EXIT_FAILED, failed.stderr
    *_, end = bucket.events()
    assert end["event"] == "end"
    assert end["status"] == "failed"
    assert "no third step" in end["error"]
    assert SECRET not in failed.stdout + failed.stderr
    resumed = bucket.train("second", "--mesh", "tp2", "--steps", "4", "--resume", "auto")
    assert resumed.returncode == EXIT_OK, resumed.stderr
    losses = bucket.losses()
    bucket.fs.rm("bucket/run", recursive=True)
    whole = bucket.train("third", "--mesh", "dp2", "--steps", "4")
    assert whole.returncode == EXIT_OK, whole.stderr
    assert losses == pytest.approx(bucket.losses(), abs=1e-5)
    assert len(losses) == 4


def test_without_credentials_or_a_bucket_a_run_is_rejected_in_one_line(bucket: Bucket) -> None:
    nothing = {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    done = bucket.train("here", "--steps", "1", HOME=str(bucket.folder), **nothing)
    assert done.returncode == EXIT_USER
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: save.remote: {URL}: cannot be listed (got NoCredentialsError")
    assert "Fix: set the credentials" in line
