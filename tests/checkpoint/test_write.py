"""Writing a checkpoint: it is complete or absent whatever fails meanwhile, and it is never written twice."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import bits, facts_of, held_by, raw, same_bits, save, small_state
from weft.checkpoint import commit as commit_module
from weft.checkpoint import write
from weft.checkpoint.commit import commit, discard
from weft.checkpoint.folder import (
    checkpoint_path,
    find_newest,
    prune,
    remove_leftovers,
    temporary_path,
)
from weft.checkpoint.format import DIGEST, MANIFEST
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem, snapshot
from weft.core.axes import Box
from weft.errors import CheckpointError

WHOLE = Box((0, 0), (4, 6))


def held(name: str = "model/a", lo=(0, 0), hi=(4, 6), dtype=torch.float32) -> WriteItem:
    box = Box(tuple(lo), tuple(hi))
    return WriteItem(name=name, shape=(4, 6), box=box, tensor=torch.zeros(box.shape, dtype=dtype))


def written(tmp: Path, *ranks: list[WriteItem]) -> None:
    for rank, pieces in enumerate(ranks):
        start_write(tmp, rank, pieces).wait()


@contextmanager
def rejected(*words: str):
    with pytest.raises(CheckpointError) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)


# What makes up a checkpoint


def test_a_checkpoint_is_never_overwritten_and_stays_as_it_was(tmp_path):
    state = small_state()
    path = save(tmp_path, state, step=5)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with rejected(f"{path}: a checkpoint is there already, and it is not overwritten"):
        save(tmp_path, small_state(seed=99), step=5)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert list(path.parent.iterdir()) == [path], "what was not to be is gone"


def test_a_checkpoint_that_comes_there_during_the_commit_is_not_overwritten_either(
    tmp_path, monkeypatch
):
    final = checkpoint_path(tmp_path, 1)
    written(temporary_path(final), [held()])
    real = commit_module.sync_folder

    def late(path):
        if path == temporary_path(final):
            final.mkdir()
            (final / MANIFEST).write_text("another's")
        real(path)

    monkeypatch.setattr(commit_module, "sync_folder", late)
    with rejected(f"{final}: the checkpoint is not saved: Directory not empty"):
        commit(temporary_path(final), final, facts_of(), ranks=1)
    assert (final / MANIFEST).read_text() == "another's"
    assert os.listdir(final.parent) == [final.name]


def test_a_rank_that_has_not_written_is_named(tmp_path):
    final = checkpoint_path(tmp_path, 1)
    tmp = temporary_path(final)
    written(tmp, [held()])
    with rejected(
        "rank 1 has written no file here (need rank-00001.json)", "on several hosts, a shared one"
    ):
        commit(tmp, final, facts_of(), ranks=2)
    assert not tmp.exists()
    assert not final.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "what rank 1 has written cannot be read (got Is a directory"),
        ("", "what rank 1 has written is damaged"),
    ],
)
def test_what_a_rank_has_written_and_cannot_be_read_is_a_failed_save(tmp_path, content, words):
    final = checkpoint_path(tmp_path, 1)
    tmp = temporary_path(final)
    written(tmp, [held()])
    second = tmp / "rank-00001.json"
    if content is None:
        second.mkdir()
    else:
        second.write_text(content)
    with rejected(words):
        commit(tmp, final, facts_of(), ranks=2)
    assert not tmp.exists()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (
            [held(hi=(4, 3))],
            "model/a: the pieces of all ranks do not cover the tensor: entries [0:4, 3:6] are in no piece",
        ),
        ([held(), held(lo=(1, 2), hi=(2, 4))], "entries [1:2, 2:4] are in more than one piece"),
        (
            [held(), held(lo=(1, 2), hi=(2, 4), dtype=torch.float16)],
            "model/a: pieces of different tensors have the",
        ),
    ],
)
def test_pieces_that_do_not_make_up_a_tensor_are_no_checkpoint(tmp_path, pieces, words):
    final = checkpoint_path(tmp_path, 1)
    written(temporary_path(final), *([piece] for piece in pieces))
    with rejected(words):
        commit(temporary_path(final), final, facts_of(), ranks=len(pieces))
    assert not os.listdir(final.parent)


def test_one_rank_does_not_hold_a_piece_twice(tmp_path):
    with rejected("model/a: rank 3 holds the same piece twice"):
        start_write(tmp_path / "tmp", 3, [held(), held()])


def test_a_piece_fits_its_box_its_tensor_and_a_type_that_can_be_stored():
    zeros = torch.zeros(4, 6)
    for arguments, words in (
        (
            ("model/a", (4, 6), Box((0, 0), (4, 7)), torch.zeros(4, 7)),
            "the piece lies outside its tensor",
        ),
        (("model/a", (4, 6), Box((0,), (4,)), torch.zeros(4)), "the piece lies outside its tensor"),
        (
            ("model/a", (4, 6), Box((0, 0), (3, 6)), zeros),
            "the piece and its box have different shapes",
        ),
        (("model/a", (4, 6), WHOLE, zeros.to(torch.complex64)), "this dtype cannot be stored"),
        (("a", (4, 6), WHOLE, zeros), "is not a valid name of a stored tensor"),
        (("model//a", (4, 6), WHOLE, zeros), "is not a valid name of a stored tensor"),
    ):
        with rejected(words):
            WriteItem(*arguments)


def test_a_rank_with_nothing_to_write_and_strided_and_device_like_tensors_are_fine(tmp_path):
    whole = bits((6, 8), dtype=torch.float32, seed=1)
    final = checkpoint_path(tmp_path, 1)
    view = whole.t().contiguous().t()  # not in row-major order
    box = Box((0, 0), (6, 3))
    write_item = WriteItem("model/a", (6, 8), box, view[:, :3])
    pieces = [write_item, WriteItem("model/a", (6, 8), Box((0, 3), (6, 8)), whole[:, 3:])]
    parameter = torch.nn.Parameter(torch.ones(3))
    written(
        temporary_path(final), pieces, [], [WriteItem("model/p", (3,), Box((0,), (3,)), parameter)]
    )
    commit(temporary_path(final), final, facts_of(), ranks=3)
    source = open_checkpoint(final).section("model")
    assert same_bits(source.read("a", Box.whole((6, 8))), whole)
    actual = source.read("p", Box((0,), (3,)))
    assert torch.equal(actual, torch.ones(3))


def test_a_snapshot_does_not_see_what_training_does_next():
    tensor = torch.arange(12.0).view(3, 4)
    box = Box((0, 1), (3, 3))
    pieces = [WriteItem("model/a", (3, 4), box, tensor[:, 1:3])]
    taken = snapshot(pieces).items
    before = raw(tensor[:, 1:3])
    tensor.zero_()
    assert raw(taken[0].tensor) == before
    assert taken[0].tensor.is_contiguous(), "so that writing needs no second copy"
    assert taken[0].box == pieces[0].box


@pytest.mark.gpu
def test_a_snapshot_of_a_device_has_the_values_from_before_the_next_change(tmp_path):
    tensors = []
    for index in range(8):
        tensors.append(torch.full((1 << 20,), float(index), device="cuda"))
    pieces = [
        WriteItem(name=f"model/t{i}", shape=(1 << 20,), box=Box((0,), (1 << 20,)), tensor=tensor)
        for i, tensor in enumerate(tensors)
    ]
    copied = snapshot(pieces)
    copied.under_way.before_change()
    for tensor in tensors:
        tensor.zero_()
    copied.under_way.wait()
    taken = copied.items
    for index, piece in enumerate(taken):
        assert bool((piece.tensor == index).all())
    assert {piece.tensor.device.type for piece in taken} == {"cpu"}
    written(tmp_path / "tmp", taken)


def test_pieces_are_written_from_where_they_lie_and_let_go_of_one_by_one(tmp_path, monkeypatch):
    seen: list[tuple[int, int]] = []
    real = write.block_crcs

    def blocks(data, *, block_bytes):
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        seen.append((address, len(writing._items)))
        return real(data, block_bytes=block_bytes)

    monkeypatch.setattr(write, "block_crcs", blocks)
    monkeypatch.setattr(
        write.threading.Thread, "start", lambda self: None
    )  # until `writing` has its name
    pieces = [
        WriteItem(name=f"model/{name}", shape=(4,), box=Box((0,), (4,)), tensor=torch.zeros(4))
        for name in "abc"
    ]
    writing = start_write(tmp_path / "tmp", 0, pieces)
    writing._run()
    expected_seen = []
    for piece, left in zip(pieces, (2, 1, 0), strict=True):
        expected_seen.append((piece.tensor.data_ptr(), left))
    assert seen == expected_seen


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    import threading

    gate = threading.Event()
    real = write._write_rank
    monkeypatch.setattr(
        write, "_write_rank", lambda *given, **options: (gate.wait(60), real(*given, **options))
    )
    writing = start_write(tmp_path / "tmp", 0, [held()])
    assert not writing.done()
    gate.set()
    writing.wait()
    assert writing.done()
    assert writing.num_bytes == 4 * 6 * 4


# What survives


class Watched:
    """Stands in for the calls that change the disk and tells `tell` before each of them."""

    def __init__(self, patch: pytest.MonkeyPatch, tell) -> None:
        for owner, name in (
            (os, "fsync"),
            (Path, "rename"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (Path, "open"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, self.wrapped(getattr(owner, name), name, tell))

    @staticmethod
    def wrapped(real, name, tell):
        def call(first, *rest, **named):
            tell(name, first, *rest)
            return real(first, *rest, **named)

        return call


def handle_path(handle: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{handle}"))


def test_everything_is_on_the_disk_before_the_rename_and_the_name_is_after_it(
    tmp_path, monkeypatch
):
    final = checkpoint_path(tmp_path, 7)
    tmp = temporary_path(final)
    synced = []
    at_rename = []

    def tell(name, first, *rest):
        if name == "fsync":
            path = handle_path(first)
            synced.append(
                (path, path.stat().st_size if path.is_file() else tuple(sorted(os.listdir(path))))
            )
        elif name == "rename" and rest == (final,):
            at_rename.append({file: file.stat().st_size for file in first.iterdir()})
            assert (tmp, tuple(sorted(file.name for file in at_rename[0]))) == synced[-1], (
                "the names in it, last"
            )
            assert at_rename[0].items() <= dict(synced[:-1]).items(), (
                "every file, at its full length"
            )
            synced.clear()

    with monkeypatch.context() as patch:
        Watched(patch, tell)
        save(tmp_path, small_state(), step=7, ranks=3)
    (files,) = at_rename
    assert {file.name for file in files} == {
        MANIFEST,
        DIGEST,
        *(f"rank-0000{rank}.safetensors" for rank in range(3)),
    }
    assert [path for path, _ in synced] == [final.parent, tmp_path], (
        "then its own name, and that of ckpt/"
    )


def test_at_every_moment_of_a_save_and_a_removal_there_is_a_whole_newest_checkpoint(tmp_path):
    """The disk is copied before every call that changes it: each copy is what a crash there would
    leave.
    """
    run = tmp_path / "run"
    copies = []
    old = small_state(1)
    new = small_state(2)
    save(run, small_state(0), step=10)
    save(run, old, step=20)

    with pytest.MonkeyPatch.context() as patch:
        copying = []

        def tell(name, first, *rest):
            if not copying and (name != "open" or "x" in str(rest)):
                copying.append(1)
                shutil.copytree(run, tmp_path / f"copy-{len(copies)}", symlinks=True)
                copies.append((name, str(first)))
                copying.clear()

        Watched(patch, tell)
        save(run, new, step=30)
        prune(run, 1)
    names = [name for name, _ in copies]
    assert len(copies) > 15
    renamed = names.index("rename")
    for index in range(len(copies)):
        at = tmp_path / f"copy-{index}"
        step, state = (20, old) if index <= renamed else (30, new)
        found = find_newest(at)
        assert found.path == checkpoint_path(at, step), copies[index]
        assert found.faults == ()
        checkpoint = open_checkpoint(found.path)
        checkpoint.verify()
        for name, tensor in state.items():
            section, _, parameter = name.rpartition("/")
            assert same_bits(
                checkpoint.section(section).read(parameter, Box.whole(tensor.shape)), tensor
            )
        remove_leftovers(at)
        for path in (at / "ckpt").iterdir():
            assert path.name.startswith("step-")


def test_what_a_dead_run_left_does_not_become_part_of_a_checkpoint(tmp_path):
    final = checkpoint_path(tmp_path, 1)
    tmp = temporary_path(final)
    written(tmp, [held(hi=(2, 6))], [held(lo=(2, 0))])
    with rejected("the checkpoint is not saved: File exists"):
        written(tmp, [held()])
    discard(tmp)
    written(tmp, [held()])
    commit(tmp, final, facts_of(), ranks=1)
    assert sorted(os.listdir(final)) == [MANIFEST, DIGEST, "rank-00000.safetensors"]


def test_an_error_in_the_background_is_kept_until_it_is_asked_for(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(write, "_write_rank", broken)
    writing = start_write(tmp_path / "tmp", 0, held_by(small_state(), ranks=1, seed=0)[0])
    with pytest.raises(MemoryError, match="no more"):
        writing.wait()
    assert writing.done()
