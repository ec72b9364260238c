"""Copies of checkpoints at a URL: interrupted uploads, the newest complete copy, downloads, a single writer."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint import states
from tests.tiny_run import TINY
from weft.checkpoint import remote_files
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.format import DIGEST
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.remote import OWN_WRITER, RemoteCopies, RemoteFolder
from weft.checkpoint.remote_files import RemoteFiles, without_secrets
from weft.checkpoint.remote_url import KEY, local_folder, url_faults
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.load import load
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, CheckpointError
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.build_training import build_training
from weft.train.event_lines import read_events, step_history
from weft.train.event_log import EVENTS
from weft.train.step import TrainStep

URL = "memory://bucket/run"


class BreakingFileSystem(MemoryFileSystem):
    """A file system in memory whose requests are counted, and fail from one of them on."""

    protocol = "breaking"
    cachable = False
    requests: ClassVar[list[tuple[str, str]]] = []
    break_at: int | None = None

    @classmethod
    def count(cls, request: str, path: str) -> None:
        if cls.break_at is not None and len(cls.requests) >= cls.break_at:
            raise ConnectionError("the link is down")
        cls.requests.append((request, path))

    def put_file(self, lpath: Any, rpath: Any, **options: Any) -> None:
        self.count("put", rpath)
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath: Any, lpath: Any, **options: Any) -> None:
        self.count("get", rpath)
        super().get_file(rpath, lpath, **options)

    def pipe_file(self, path: Any, value: Any, **options: Any) -> None:
        self.count("write", path)
        super().pipe_file(path, value, **options)

    def rm_file(self, path: Any) -> None:
        self.count("remove", path)
        super().rm_file(path)


@pytest.fixture
def bucket(monkeypatch) -> RemoteFolder:
    """An empty folder in memory; failed requests are repeated at once."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    BreakingFileSystem.requests.clear()
    BreakingFileSystem.break_at = None
    monkeypatch.setattr(remote_files, "PAUSE_S", 0.0)
    return RemoteFolder(RemoteFiles(url=URL, fs=BreakingFileSystem(), root="/bucket/run"))


def save(run_folder: Path, step: int) -> Path:
    """A checkpoint of two ranks, of different values for each step."""
    return states.save(run_folder, states.small_state(step), step=step)


def requests_of(kind: str) -> list[str]:
    return [Path(path).name for request, path in BreakingFileSystem.requests if request == kind]


def test_a_copy_is_downloaded_bit_by_bit_on_another_host(bucket, tmp_path):
    here = tmp_path / "here"
    there = tmp_path / "there"
    path = save(here, 3)
    bucket.upload(path, nonce=bucket.claim(here))
    assert bucket.fetch(there) == 3
    copy = checkpoint_path(there, 3)
    expected = {each.name: each.read_bytes() for each in copy.iterdir()}
    assert {each.name: each.read_bytes() for each in path.iterdir()} == expected
    open_checkpoint(copy).verify()


def test_an_upload_interrupted_anywhere_leaves_the_checkpoint_before_usable(bucket, tmp_path):
    here = tmp_path / "here"
    nonce = bucket.claim(here_with_folder(here))
    bucket.upload(save(here, 1), nonce=nonce)
    second = save(here, 2)
    num_requests = 0
    for number in range(100):
        BreakingFileSystem.break_at = len(BreakingFileSystem.requests) + number
        try:
            bucket.upload(second, nonce=nonce)
        except CheckpointError as error:
            (fault,) = error.faults
            assert fault.key == KEY
            assert "ConnectionError: the link is down" in str(fault)
        else:
            break
        finally:
            BreakingFileSystem.break_at = None
        assert bucket.newest() == 1
        there = tmp_path / str(number)
        assert bucket.fetch(there) == 1
        open_checkpoint(checkpoint_path(there, 1)).verify()
        num_requests = number + 1
    assert num_requests >= 4, "two data files, the manifest, its checksum"
    assert bucket.newest() == 2


def here_with_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_torn_or_damaged_copy_does_not_count(bucket, tmp_path):
    here = tmp_path / "here"
    nonce = bucket.claim(here_with_folder(here))
    for step in (1, 2):
        bucket.upload(save(here, step), nonce=nonce)
    for damage in (
        lambda fs, path: fs.pipe_file(f"{path}/{DIGEST}", b"0" * 64),
        lambda fs, path: fs.pipe_file(f"{path}/manifest.json", b"{}"),
        lambda fs, path: fs.pipe_file(f"{path}/rank-00001.safetensors", b"short"),
        lambda fs, path: fs.rm_file(f"{path}/rank-00000.safetensors"),
    ):
        path = bucket.files.path("ckpt", "step-000002")
        before = {
            name: bucket.files.fs.cat_file(name) for name in bucket.files.fs.ls(path, detail=False)
        }
        damage(bucket.files.fs, path)
        assert bucket.newest() == 1
        for name, content in before.items():
            bucket.files.fs.pipe_file(name, content)
        assert bucket.newest() == 2


def test_only_missing_files_are_downloaded(bucket, tmp_path):
    here = tmp_path / "here"
    there = tmp_path / "there"
    bucket.upload(save(here, 5), nonce=bucket.claim(here))
    BreakingFileSystem.requests.clear()
    BreakingFileSystem.break_at = 1
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        bucket.fetch(there)
    assert list(checkpoints(there)) == []
    BreakingFileSystem.break_at = None
    BreakingFileSystem.requests.clear()
    assert bucket.fetch(there) == 5
    assert requests_of("get") == ["rank-00001.safetensors"]
    BreakingFileSystem.requests.clear()
    assert bucket.fetch(there) == 5
    assert requests_of("get") == []


def test_files_of_an_interrupted_download_are_not_those_of_a_later_copy_of_the_step(
    bucket, tmp_path
):
    there = tmp_path / "there"
    bucket.upload(save(tmp_path / "here", 5), nonce=bucket.claim(tmp_path / "here"))
    BreakingFileSystem.requests.clear()
    BreakingFileSystem.break_at = 1
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        bucket.fetch(there)
    BreakingFileSystem.break_at = None
    again = states.save(tmp_path / "again", states.small_state(6), step=5)
    bucket.upload(again, nonce=bucket.claim(tmp_path / "again"))
    assert bucket.fetch(there) == 5
    open_checkpoint(checkpoint_path(there, 5)).verify()


def test_old_copies_are_removed(bucket, tmp_path, monkeypatch):
    here = here_with_folder(tmp_path / "here")
    monkeypatch.setattr(RemoteFolder, "open", lambda url: bucket)
    copies = RemoteCopies(URL, here, keep=2, num_done=0)
    for step in (1, 2, 3, 4):
        assert copies.upload(save(here, step)) == f"{URL}/ckpt/step-00000{step}"
    assert bucket.steps() == [4, 3]


def test_copies_of_steps_that_are_trained_again_do_not_count(bucket, tmp_path, monkeypatch):
    here = here_with_folder(tmp_path / "here")
    nonce = bucket.claim(here)
    for step in (1, 2, 3):
        bucket.upload(save(here, step), nonce=nonce)
    monkeypatch.setattr(RemoteFolder, "open", lambda url: bucket)
    copies = RemoteCopies(URL, here, keep=9, num_done=1)
    assert bucket.newest() == 1
    shutil.rmtree(checkpoint_path(here, 2))
    copies.upload(save(here, 2))
    assert bucket.newest() == 2


def test_an_earlier_writer_stops_when_a_later_start_has_taken_over(bucket, tmp_path):
    first = here_with_folder(tmp_path / "a")
    second = here_with_folder(tmp_path / "b")
    nonce = bucket.claim(first)
    bucket.upload(save(first, 1), nonce=nonce)
    bucket.claim(second)
    with pytest.raises(CheckpointError, match="another run writes to memory://bucket/run"):
        bucket.upload(save(first, 2), nonce=nonce)
    assert bucket.newest() == 1


def test_checkpoints_of_a_host_that_another_one_has_overtaken_are_set_aside(bucket, tmp_path):
    """The run was at step 3 here, went on elsewhere from step 1, and comes back."""
    here = here_with_folder(tmp_path / "here")
    there = tmp_path / "there"
    bucket.upload(save(here, 1), nonce=bucket.claim(here))
    save(here, 3)
    assert bucket.fetch(here) == 1
    assert [step for step, _ in checkpoints(here)] == [3, 1], "its own, not uploaded"
    bucket.fetch(there)
    bucket.upload(save(there, 2), nonce=bucket.claim(there))
    assert bucket.fetch(here) == 2
    assert [step for step, _ in checkpoints(here)] == [2, 1]
    assert (here / "ckpt" / "aside-step-000003").is_dir()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("memory://bucket", "is lost when the process ends"),
        ("http://host/run", "cannot be written"),
        ("simplecache::s3://bucket/run", "is no URL of a folder"),
        ("nowhere://bucket/run", "names an unknown file system"),
        ("ftp://user:word@host/run", "holds a password, which would be written into run.toml"),
        ("s3://", "is no URL of a folder"),
        ("://x", "is no URL of a folder"),
        ("file://[/x", "is no URL of a folder"),
    ],
)
def test_urls_that_cannot_serve_are_one_line(url, text):
    (fault,) = url_faults(url)
    assert fault.key == KEY
    assert text in str(fault)
    assert "word" not in str(fault).replace("password", "")


def test_messages_of_a_file_system_hold_no_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-token")
    text = "denied: canary-secret canary-token https://s3/x?X-Amz-Signature=canary-sign&part=2"
    assert without_secrets(text) == "denied: *** *** https://s3/x?X-Amz-Signature=***&part=2"


def test_a_request_without_rights_is_not_repeated_and_names_the_credentials(bucket, monkeypatch):
    tries: list[str] = []

    def refuse(path: str, **_options: object) -> None:
        tries.append(path)
        raise PermissionError("Access Denied")

    monkeypatch.setattr(bucket.files.fs, "ls", refuse)
    with pytest.raises(CheckpointError, match=r"Access Denied.*Fix: set the cred"):
        bucket.steps()
    assert len(tries) == 1


def test_the_local_folder_is_a_function_of_the_url():
    assert local_folder("s3://b/my run/") == local_folder("s3://b/my run")
    assert local_folder("s3://b/x") != local_folder("s3://c/x")
    assert local_folder("s3://b/../../etc").parent == Path("runs", "remote")


# ------------------------------------------------------------------------------------------------ whole runs


@dataclass(frozen=True)
class HostFolder:
    """Training on a host with a disk of its own."""

    enter: Callable[[Path], None]
    url: str

    def train(self, host: Path, *words: str) -> int:
        host.mkdir(exist_ok=True)
        self.enter(host)
        data = ("--data.source", str(host.parent / "text.txt"), "--optim.decay", "constant")
        return main(["train", *TINY, *data, "--save.every", "1", "--out", self.url, *words])

    def out(self, host: Path) -> Path:
        return host / local_folder(self.url)

    def losses(self, host: Path) -> list[float]:
        events = read_events(self.out(host) / EVENTS)
        return [event["loss"] for event in step_history(events)]


@pytest.fixture
def training(tmp_path, monkeypatch) -> HostFolder:
    text = "the quick brown fox jumps over the lazy dog. " * 50
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setattr(remote_files, "PAUSE_S", 0.0)
    return HostFolder(monkeypatch.chdir, f"file://{tmp_path}/bucket/run")


def test_a_run_whose_out_is_a_url_goes_on_on_another_host(training, tmp_path, capsys):
    first = tmp_path / "first"
    second = tmp_path / "second"
    alone = tmp_path / "alone"
    assert training.train(first, "--steps", "2", "--mesh", "dp2") == EXIT_OK
    events = read_events(training.out(first) / EVENTS)
    saves = [event for event in events if "remote" in event]
    assert saves[-1]["remote"] == f"{training.url}/ckpt/step-000002"
    path = tmp_path / "bucket" / "run" / EVENTS
    copied = list(read_events(path))
    assert copied[-1]["event"] == "end"
    assert copied == list(read_events(training.out(first) / EVENTS))
    shutil.rmtree(first / "runs")
    resume = ("--resume", "auto", "--mesh", "tp2")
    assert training.train(second, "--steps", "4", *resume) == EXIT_OK
    resumed = [
        event for event in read_events(training.out(second) / EVENTS) if event["event"] == "resume"
    ]
    assert [event["step"] for event in resumed] == [2]
    assert RemoteFolder.open(training.url).newest() == 4
    moved = HostFolder(training.enter, f"{training.url}-2")
    assert moved.train(alone, "--steps", "4", "--mesh", "dp2") == EXIT_OK
    assert training.losses(second) == pytest.approx(moved.losses(alone), abs=1e-5)
    capsys.readouterr()
    assert training.train(tmp_path / "third", "--steps", "4") == EXIT_USER
    assert "error: out: holds a run already" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_read_again_is_saved_here_only(
    training, tmp_path, capsys, monkeypatch
):
    """The error of the disk ended the run in the middle, with a traceback."""

    def fail(*_arguments: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RemoteCopies, "upload", fail)
    host = tmp_path / "host"
    assert training.train(host, "--steps", "2") == EXIT_FAILED
    output = capsys.readouterr()
    assert "step 1 is saved here only" in output.out + output.err
    assert "which could not be saved" in output.err
    assert "step-000002 cannot be read: Input/output error" in output.err
    assert [step for step, _ in checkpoints(training.out(host))] == [2, 1]


def test_uploads_that_fail_are_told_and_end_the_run_with_an_error(
    training, tmp_path, capsys, monkeypatch
):
    host = tmp_path / "host"
    assert training.train(host, "--steps", "1") == EXIT_OK
    local = type(fsspec.filesystem("file"))

    def fail(*_arguments: object, **_options: object) -> None:
        raise ConnectionError("the link is down")

    monkeypatch.setattr(local, "put_file", fail)
    capsys.readouterr()
    assert training.train(host, "--steps", "3", "--resume", "auto") == EXIT_FAILED
    output = capsys.readouterr()
    assert "finished after step 3, which could not be saved: save.remote: " in output.err
    assert "warning: step 2 is saved here only" in output.out + output.err
    actual = [step for step, _ in checkpoints(training.out(host))]
    assert actual == [3, 2]
    monkeypatch.undo()
    monkeypatch.chdir(host)
    assert RemoteFolder.open(training.url).newest() == 1
    assert training.train(host, "--steps", "4", "--resume", "auto") == EXIT_OK
    assert RemoteFolder.open(training.url).newest() == 4
    assert (training.out(host) / OWN_WRITER).is_file()


def test_the_end_of_a_failed_run_is_copied_to_its_url(training, tmp_path, monkeypatch):
    call = TrainStep.__call__

    def fail_in_step_2(self: TrainStep, *words: object, **options: object) -> object:
        if checkpoint_path(training.out(tmp_path / "host"), 1).exists():
            raise ValueError("no second step")
        return call(self, *words, **options)

    monkeypatch.setattr(TrainStep, "__call__", fail_in_step_2)
    code = training.train(tmp_path / "host", "--steps", "9", "--prove.before", "never")
    assert code == EXIT_FAILED
    path = tmp_path / "bucket" / "run" / EVENTS
    *_, end = read_events(path)
    assert end["status"] == "failed"
    assert "no second step" in end["error"]
    events = list(read_events(training.out(tmp_path / "host") / EVENTS))
    expected = events[-1]
    assert end == expected


@pytest.mark.parametrize("makes_copies", [False, True])
def test_a_proof_that_repeats_a_run_leaves_its_url_alone(tmp_path, makes_copies):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    remote_words = ("--save.remote", f"file://{tmp_path}/bucket", "--out", str(tmp_path / "run"))
    words = [*TINY, "--data.source", str(tmp_path / "text.txt"), *remote_words]
    run = load(words, FAMILIES)
    (tmp_path / "run").mkdir()

    def build(comm: Comm) -> None:
        build_training(run, comm, stop_requested=lambda: False, makes_copies=makes_copies)

    run_ranks("", build)
    assert (tmp_path / "bucket").exists() == makes_copies
