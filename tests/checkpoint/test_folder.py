"""The checkpoint folder of a run: which checkpoint is the newest complete one, which are deleted, and in what order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.states import save, small_state
from weft.checkpoint import folder, kept
from weft.checkpoint.folder import (
    checkpoint_path,
    checkpoints,
    find_newest,
    prune,
    remove_leftovers,
    temporary_path,
)
from weft.checkpoint.format import DIGEST, MANIFEST
from weft.checkpoint.read import open_checkpoint

pytestmark = pytest.mark.usefixtures("fast_disk")


def saved(run: Path, *steps: int) -> list[Path]:
    return [save(run, small_state(step), step=step) for step in steps]


def test_the_newest_is_the_one_with_most_steps_and_names_sort_in_that_order(tmp_path):
    saved(tmp_path, 5, 100, 20)
    save(tmp_path, small_state(), step=1_000_000)
    found = find_newest(tmp_path)
    assert found.path == checkpoint_path(tmp_path, 1_000_000)
    assert found.manifest.facts.step == 1_000_000
    assert found.faults == ()
    assert [step for step, _ in checkpoints(tmp_path)] == [1_000_000, 100, 20, 5]
    assert find_newest(tmp_path, below=100).path == checkpoint_path(tmp_path, 20)


def test_no_run_no_folder_and_no_checkpoint_are_nothing_and_no_error(tmp_path):
    for run in (tmp_path / "none", tmp_path):
        assert find_newest(run) == folder.FoundCheckpoint(None, None, ())
        assert prune(run, 1) == remove_leftovers(run) == ()


def test_many_folders_that_hold_no_checkpoint_are_passed_over(tmp_path, monkeypatch):
    (whole,) = saved(tmp_path, 1)
    for step in range(2, 200):
        checkpoint_path(tmp_path, step).mkdir()
    read: list[Path] = []
    original = folder.read_manifest
    monkeypatch.setattr(folder, "read_manifest", lambda path: read.append(path) or original(path))
    found = find_newest(tmp_path)
    assert found.path == whole
    assert len(found.faults) == folder.MAX_FAULTS
    assert len(read) == folder.MAX_FAULTS + 1


@pytest.mark.parametrize("has_digest", [False, True])
def test_many_broken_manifests_are_not_all_read(tmp_path, monkeypatch, has_digest):
    """With checksums they look whole: then older checkpoints are left out, and a fault says so."""
    (whole,) = saved(tmp_path, 1)
    for step in range(2, 100):
        broken = checkpoint_path(tmp_path, step)
        broken.mkdir()
        (broken / MANIFEST).write_text("garbage {[")
        if has_digest:
            (broken / DIGEST).write_text("garbage")
    read: list[Path] = []
    original = folder.read_manifest
    monkeypatch.setattr(folder, "read_manifest", lambda path: read.append(path) or original(path))
    monkeypatch.setattr(folder, "MAX_BROKEN", 20)
    found = find_newest(tmp_path)
    if has_digest:
        assert (found.path, len(read)) == (None, 20)
        assert "this and older checkpoints are not read" in str(found.faults[0])
    else:
        assert (found.path, len(read)) == (whole, folder.MAX_FAULTS + 1)


def cut_short(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1)


def test_broken_ones_are_skipped_and_reported_newest_first(tmp_path):
    whole, short, missing, flipped = saved(tmp_path, 1, 2, 3, 4)
    cut_short(short / "rank-00001.safetensors")
    (missing / "rank-00000.safetensors").unlink()
    text = bytearray((flipped / MANIFEST).read_bytes())
    text[40] ^= 1
    (flipped / MANIFEST).write_bytes(text)
    found = find_newest(tmp_path)
    assert found.path == whole
    assert [fault.key for fault in found.faults] == [
        str(flipped / MANIFEST),
        str(missing / "rank-00000.safetensors"),
        str(short / "rank-00001.safetensors"),
    ]


def test_what_is_not_a_checkpoint_by_name_is_not_looked_at(tmp_path):
    (path,) = saved(tmp_path, 7)
    for name in ("step-7", "step-000009.bak", ".tmp-step-000010", "notes.txt", ".old-step-000011"):
        (path.parent / name).mkdir()
    assert find_newest(tmp_path).path == path
    assert find_newest(tmp_path).faults == ()


def test_the_newest_are_kept_and_broken_ones_do_not_count(tmp_path):
    one, two, three, four, five = saved(tmp_path, 1, 2, 3, 4, 5)
    (four / DIGEST).unlink()
    assert prune(tmp_path, 2) == (two, one)
    actual = [path for _, path in checkpoints(tmp_path)]
    assert actual == [five, four, three]
    actual = sorted(os.listdir(five.parent))
    expected = [path.name for path in (three, four, five)]
    assert actual == expected
    assert prune(tmp_path, 2) == ()


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    old, new = saved(tmp_path, 1, 2)
    seen = []

    def rmtree(path, **_):
        if path.exists():
            seen.append(
                ([path for _, path in checkpoints(tmp_path)], path.name, len(os.listdir(path)))
            )

    files = len(os.listdir(old))
    monkeypatch.setattr(kept.shutil, "rmtree", rmtree)
    prune(tmp_path, 1)
    assert seen == [([new], ".old-step-000001", files)], (
        "removed by its own name, or not whole when it went"
    )


def test_leftovers_of_a_run_that_died_are_removed_and_nothing_else(tmp_path):
    (path,) = saved(tmp_path, 7)
    left = [temporary_path(checkpoint_path(tmp_path, 8)), path.with_name(".old-step-000003")]
    for each in left:
        each.mkdir()
        (each / "rank-00000.safetensors").write_bytes(b"half")
    assert set(remove_leftovers(tmp_path)) == set(left)
    assert list(path.parent.iterdir()) == [path]
    open_checkpoint(path).verify()
