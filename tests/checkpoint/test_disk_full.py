"""Saving to a full disk: the error states how many bytes are missing, and existing checkpoints stay intact."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import facts_of, save, small_state
from weft.checkpoint import disk
from weft.checkpoint.commit import commit, discard
from weft.checkpoint.folder import checkpoint_path, find_newest, temporary_path
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem
from weft.core.axes import Box
from weft.errors import CheckpointError

TWO_MIB = 2 * 2**20


def big(num_bytes: int = 3 * TWO_MIB) -> WriteItem:
    return WriteItem(
        name="model/big",
        shape=(num_bytes // 4,),
        box=Box((0,), (num_bytes // 4,)),
        tensor=torch.ones(num_bytes // 4),
    )


def save_big(run: Path) -> str:
    """What the error says."""
    final = checkpoint_path(run, 2)
    writing = start_write(temporary_path(final), 0, [big()])
    with pytest.raises(CheckpointError) as caught:
        writing.wait()
    discard(temporary_path(final))
    return str(caught.value)


def check_unharmed(run: Path, path: Path) -> None:
    assert os.listdir(run / "ckpt") == [path.name]
    assert find_newest(run).path == path
    open_checkpoint(path).verify()


def test_a_full_disk_says_how_much_was_needed_and_what_was_free(small_disk):
    path = save(small_disk, small_state(), step=1)
    free = disk.free_bytes(small_disk)
    text = save_big(small_disk)
    where = temporary_path(checkpoint_path(small_disk, 2))
    assert text == (
        f"{where}: the checkpoint is not saved: the disk is full (No space left on device) "
        f"(got {free:,} bytes free; need {3 * TWO_MIB:,} bytes). Fix: free disk space, choose another out, or lower save.keep"
    )
    check_unharmed(small_disk, path)
    save(small_disk, small_state(5), step=3)
    assert find_newest(small_disk).path == checkpoint_path(small_disk, 3), (
        "with room again, saving goes on"
    )


def test_a_limit_on_the_length_of_files_is_a_full_disk_too(tmp_path):
    path = save(tmp_path, small_state(), step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (TWO_MIB, hard))
    try:
        text = save_big(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the disk is full (File too large)" in text
    assert f"need {3 * TWO_MIB:,} bytes" in text
    check_unharmed(tmp_path, path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_an_error_of_any_one_disk_call_of_a_save_harms_nothing(tmp_path, code):
    """Every flush of the save fails in turn: in a rank, in the commit, until none is left to fail."""
    path = save(tmp_path, small_state(), step=1)
    real = os.fsync
    errors = list[str]()
    for fail_at in range(100):
        calls = 0

        def fsync(handle):
            nonlocal calls
            calls += 1
            if calls == fail_at + 1:  # noqa: B023
                raise OSError(code, os.strerror(code))
            real(handle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            final = checkpoint_path(tmp_path, 2)
            try:
                start_write(temporary_path(final), 0, [big(64)]).wait()
                commit(temporary_path(final), final, facts_of(2), ranks=1)
            except CheckpointError as error:
                errors.append(str(error))
                discard(temporary_path(final))
        if (
            final.exists()
        ):  # the rename was done: the checkpoint is whole, whatever the disk says of its name
            open_checkpoint(final).verify()
            if calls <= fail_at:
                break
            for file in final.iterdir():
                file.unlink()
            final.rmdir()
        check_unharmed(tmp_path, path)
    for text in errors:
        assert os.strerror(code) in text
    for text in errors:
        assert ("disk is full" in text) == (code in disk.DISK_FULL_ERRNOS)
    assert len(errors) == calls == 6, (
        "data, manifest, checksum, their folder, ckpt/, the run's folder"
    )


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "ckpt").write_text("a file")
    tmp = temporary_path(checkpoint_path(tmp_path, 1))
    writing = start_write(tmp, 0, [big(64)])
    with pytest.raises(CheckpointError, match="the checkpoint is not saved: "):
        writing.wait()


def test_a_rank_that_fails_removes_its_own_files_only(tmp_path, monkeypatch):
    tmp = temporary_path(checkpoint_path(tmp_path, 1))
    start_write(tmp, 0, [big(64)]).wait()

    def full(path, text):
        path.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="64 bytes"):
        start_write(tmp, 1, [big(64)]).wait()
    assert sorted(os.listdir(tmp)) == ["rank-00000.json", "rank-00000.safetensors"]
