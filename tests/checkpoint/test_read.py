"""Unusable checkpoints: each error states in one line what is wrong and in which file."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import bits, facts_of, save, small_state
from weft.checkpoint.format import DIGEST, FORMAT, MANIFEST, digest_text
from weft.checkpoint.read import Checkpoint, open_checkpoint
from weft.checkpoint.resume import check_model
from weft.core.axes import Box
from weft.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fast_disk")


@pytest.fixture
def path(tmp_path):
    return save(tmp_path, small_state(), step=3, ranks=2, seed=4)


def rejected(action) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    text = str(caught.value)
    assert all(line.startswith("/") or "/" in line.split(":")[0] for line in text.splitlines()), (
        text
    )
    return text


def rewritten(path: Path, **changes) -> None:
    """Another manifest with a checksum that fits: by hand, or by another program."""
    data = {**json.loads((path / MANIFEST).read_bytes()), **changes}
    text = json.dumps(data).encode()
    (path / MANIFEST).write_bytes(text)
    (path / DIGEST).write_text(digest_text(text))


def test_a_path_that_does_not_exist_is_named(tmp_path):
    assert rejected(
        lambda: open_checkpoint(tmp_path / "nope")
    ) == f"{tmp_path}/nope: no such checkpoint. " + ("Fix: give OUT/ckpt/step-NNNNNN of a run")


def test_a_file_and_an_empty_folder_are_not_checkpoints(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "not a checkpoint: it is not a folder" in rejected(
        lambda: open_checkpoint(tmp_path / "file")
    )
    assert "not a checkpoint: it contains no manifest.json" in rejected(
        lambda: open_checkpoint(tmp_path)
    )


def test_a_run_folder_is_answered_with_its_newest_checkpoint(path):
    for above in (path.parent, path.parent.parent):
        complaint = rejected(partial(open_checkpoint, above))
        assert f"Fix: give one of the checkpoints in it: {path}" in complaint


def test_a_newer_format_says_which_weft_wrote_it(path):
    rewritten(path, format=FORMAT + 1, versions={"weft": "9.1", "torch": "4"}, surprise=[1])
    assert rejected(lambda: open_checkpoint(path)) == (
        f"{path}/manifest.json: a newer format (got format {FORMAT + 1} of weft 9.1; need {FORMAT} or older). "
        "Fix: use the newer weft that wrote it"
    )


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"format": 1,}'])
def test_a_manifest_that_is_no_json_is_reported(path, text):
    (path / MANIFEST).write_bytes(text)
    (path / DIGEST).write_text(digest_text(text))
    assert f"{path}/manifest.json: is not JSON: " in rejected(lambda: open_checkpoint(path))


@pytest.mark.parametrize("text", [b"[]", b"3", b"{}", b'{"format": "1"}'])
def test_json_of_something_else_is_no_checkpoint_of_weft(path, text):
    (path / MANIFEST).write_bytes(text)
    (path / DIGEST).write_text(digest_text(text))
    assert "not a checkpoint of weft: the manifest names no format" in rejected(
        lambda: open_checkpoint(path)
    )


def test_a_manifest_with_a_wrong_value_names_its_key(path):
    rewritten(path, block_bytes=-1)
    assert f"{path}/manifest.json: block_bytes: " in rejected(lambda: open_checkpoint(path))


def test_a_file_name_cannot_lead_out_of_the_folder(path):
    data = json.loads((path / MANIFEST).read_bytes())
    files = {"../rank-00000.safetensors": data["files"]["rank-00000.safetensors"]}
    rewritten(path, files=files)
    assert "manifest.json: files." in rejected(lambda: open_checkpoint(path))


def test_a_missing_checksum_and_a_checksum_of_something_else_are_reported(path):
    (path / DIGEST).write_text(f"{hashlib.sha256(b'x').hexdigest()}  {MANIFEST}\n")
    assert "manifest.json and its checksum do not agree" in rejected(lambda: open_checkpoint(path))
    (path / DIGEST).unlink()
    assert f"{path}/{DIGEST}: the manifest's checksum cannot be read" in rejected(
        lambda: open_checkpoint(path)
    )


def test_a_missing_file_names_a_tensor_that_it_held(path):
    (path / "rank-00001.safetensors").unlink()
    text = rejected(lambda: open_checkpoint(path))
    assert f"{path}/rank-00001.safetensors: missing: No such file or directory; it holds '" in text


@pytest.mark.parametrize("cut", [1, 100, None])
def test_a_file_that_is_cut_short_says_by_how_much(path, cut):
    file = path / "rank-00000.safetensors"
    length = file.stat().st_size
    left = 0 if cut is None else length - cut
    with file.open("rb+") as handle:
        handle.truncate(left)
    assert f"{file}: cut short; it holds '" in rejected(lambda: open_checkpoint(path))
    assert f"got {left} bytes; need {length}" in rejected(lambda: open_checkpoint(path))


def test_a_file_that_has_grown_is_reported(path):
    with (path / "rank-00000.safetensors").open("ab") as handle:
        handle.write(b"\0")
    assert "longer than it was written" in rejected(lambda: open_checkpoint(path))


def test_a_file_cut_short_after_the_check_is_found_when_it_is_mapped(path):
    checkpoint = open_checkpoint(path)
    for name in checkpoint.manifest.files:
        (path / name).write_bytes((path / name).read_bytes()[:-1])
    assert (
        rejected(checkpoint.verify).count("its length differs from the length that was written")
        == 2
    )


def test_files_that_have_changed_places_are_found(path, tmp_path):
    first, second = (path / f"rank-0000{rank}.safetensors" for rank in range(2))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    assert "rank-00000.safetensors" in rejected(lambda: open_checkpoint(path).verify())


def test_a_file_of_another_step_is_found(path, tmp_path):
    other = save(tmp_path, small_state(seed=77), step=4, ranks=2, seed=4)
    shutil.copy(other / "rank-00001.safetensors", path / "rank-00001.safetensors")
    assert f"{path}/rank-00001.safetensors: tensor '" in rejected(
        lambda: open_checkpoint(path).verify()
    )
    shutil.copy(other / MANIFEST, path / MANIFEST)
    shutil.copy(other / DIGEST, path / DIGEST)
    assert f"{path}/rank-00000.safetensors: tensor '" in rejected(
        lambda: open_checkpoint(path).verify()
    )


def test_a_flipped_bit_names_file_and_tensor_whenever_it_is_read(path):
    manifest = open_checkpoint(path).manifest
    piece = manifest.tensors["model/embed.weight"].pieces[0]
    bit = 8 * piece.at + 3
    flip(path / piece.file, bit)
    need = f"{path}/{piece.file}: tensor 'model/embed.weight' is damaged on the disk (got checksum "
    assert need in rejected(lambda: open_checkpoint(path).verify())
    assert need in rejected(
        lambda: open_checkpoint(path).section("model").read("embed.weight", piece.box)
    )


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_the_shares_of_all_ranks_are_every_byte_once(tmp_path, monkeypatch):
    state = {
        f"model/t{index}": bits((50 + 7 * index,), dtype=torch.float32, seed=index)
        for index in range(20)
    }
    path = save(tmp_path, state, ranks=3)
    from weft.checkpoint import data_file

    manifest = open_checkpoint(path).manifest
    crc32 = data_file.zlib.crc32
    for count in (1, 2, 3, 7, 100):
        shares = []
        for index in range(count):
            lengths: list[int] = []
            checkpoint = open_checkpoint(path)
            for file in manifest.files:
                checkpoint.file(file)
            with monkeypatch.context() as patch:
                patch.setattr(
                    data_file.zlib,
                    "crc32",
                    lambda data, lengths=lengths: (lengths.append(len(data)), crc32(data))[1],
                )
                checkpoint.verify(index, count)
            shares.append(sum(lengths))
        assert sum(shares) == sum(tensor.nbytes for tensor in state.values())
        if count <= 3:
            assert max(shares) - min(shares) <= 2 * 4 * 190, "within a piece on each side"


def test_one_damaged_rank_file_is_found_by_one_of_the_shares_only_and_reported_once(path):
    piece = open_checkpoint(path).manifest.tensors["model/embed.weight"].pieces[0]
    file = path / piece.file
    flip(file, 8 * piece.at)
    found = 0
    for index in range(4):
        try:
            open_checkpoint(path).verify(index, 4)
        except CheckpointError as error:
            found += len(error.faults)
    assert found == 1


def test_damage_to_the_header_of_a_file_without_pieces_is_found_by_one_of_the_shares(tmp_path):
    path = save(tmp_path, {"model/a": torch.ones(())}, ranks=2)
    manifest = open_checkpoint(path).manifest
    (empty,) = (
        name for name, file in manifest.files.items() if file.num_bytes == file.header_bytes
    )
    flip(path / empty, 8 * 30)
    faults = []
    for index in range(3):
        try:
            open_checkpoint(path).verify(index, 3)
        except CheckpointError as error:
            faults += map(str, error.faults)
    assert [text.split(" (")[0] for text in faults] == [
        f"{path}/{empty}: the header is damaged on the disk"
    ]


def test_a_hole_is_named_with_tensor_and_entries(path):
    checkpoint = open_checkpoint(path)
    stored = checkpoint.manifest.tensors["model/head.weight"]
    holed = stored.model_copy(update={"pieces": stored.pieces[1:]})
    manifest = checkpoint.manifest.model_copy(update={"tensors": {"model/head.weight": holed}})
    source = Checkpoint(path, manifest).section("model")
    text = rejected(lambda: source.read("head.weight", Box.whole((6, 5, 3))))
    assert f"{path}: tensor 'model/head.weight': entries [" in text
    assert "are in no piece" in text


def test_pieces_that_the_manifest_places_wrongly_are_rejected_at_the_start(path):
    data = json.loads((path / MANIFEST).read_bytes())
    data["tensors"]["model/embed.weight"]["pieces"][0]["at"] += 4
    rewritten(path, tensors=data["tensors"])
    assert "do not fill it" in rejected(lambda: open_checkpoint(path))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("hi", [99, 8], "a piece outside the tensor"),
        ("hi", [3], "dims"),
        ("crc32", [], "0 checksums"),
        ("file", "rank-00009.safetensors", "the manifest does not list this file"),
    ],
)
def test_a_piece_that_cannot_be_is_rejected_at_the_start(path, key, value, what):
    data = json.loads((path / MANIFEST).read_bytes())
    data["tensors"]["model/embed.weight"]["pieces"][0][key] = value
    rewritten(path, tensors=data["tensors"])
    text = rejected(lambda: open_checkpoint(path))
    assert "tensor 'model/embed.weight'" in text
    assert what in text


def test_a_tensor_or_box_that_is_not_there_is_reported(path):
    source = open_checkpoint(path).section("model")
    assert "no tensor 'tail.weight' in 'model'" in rejected(
        lambda: source.read("tail.weight", Box((), ()))
    )
    assert "no tensor 'tail.weight' in 'model'" in rejected(lambda: source.dtype("tail.weight"))
    for box in (Box((0, 0), (17, 8)), Box((0,), (1,))):
        complaint = rejected(partial(source.read, "embed.weight", box))
        assert "model/embed.weight: has no such entries" in complaint


def test_empty_boxes_are_read_as_nothing(path):
    source = open_checkpoint(path).section("model")
    box = Box((3, 2), (3, 5))
    shape = source.read("embed.weight", box).shape
    assert shape == (0, 3)
    shape = source.read("none.weight", Box((0, 0), (0, 4))).shape
    assert shape == (0, 4)


def test_another_model_is_rejected_by_family_and_by_field():
    facts = facts_of(1, architecture={"width": 8, "split": [2, 3]})
    where = Path("/run/ckpt/step-000001")
    check_model(where, facts, family="gpt2", architecture={"width": 8, "split": (2, 3)})
    text = rejected(lambda: check_model(where, facts, family="llama3", architecture={}))
    assert text.startswith(
        f"{where}: a checkpoint of another model: family differs (got 'gpt2'; need 'llama3')"
    )
    text = rejected(
        lambda: check_model(
            where, facts, family="gpt2", architecture={"width": 16, "split": (2, 3)}
        )
    )
    assert text.startswith(
        f"{where}: a checkpoint of another model: width differs (got 8; need 16)"
    )
