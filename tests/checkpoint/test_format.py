"""Files of a checkpoint: plain safetensors that other programs read, a canonical manifest, boxes that cover each tensor."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.states import cut, facts_of, held_by, same_bits, save, small_state
from weft.checkpoint.coverage import coverage_flaw
from weft.checkpoint.data_file import ALIGNMENT, FileEntry, lay_out, write_order
from weft.checkpoint.format import DIGEST, DTYPES, MANIFEST, Manifest, Stored
from weft.checkpoint.read import open_checkpoint
from weft.core.axes import Box

pytestmark = pytest.mark.usefixtures("fast_disk")


def test_every_data_file_is_a_safetensors_file_whose_names_say_the_box(tmp_path):
    state = small_state()
    path = save(tmp_path, state, ranks=3, seed=4)
    hands = held_by(state, ranks=3, seed=4)
    for rank, held in enumerate(hands):
        loaded = safetensors.torch.load_file(path / f"rank-{rank:05d}.safetensors")
        titled = {
            FileEntry(name=piece.name, box=piece.box, dtype="bool").title: piece.tensor
            for piece in held
            if piece.box.size
        }
        assert loaded.keys() == titled.keys()
        for title in titled:
            assert same_bits(loaded[title], titled[title])


def test_a_title_is_name_and_box():
    assert (
        FileEntry(name="model/a", box=Box((0, 2), (4, 3)), dtype="float32").title
        == "model/a[0:4,2:3]"
    )
    assert FileEntry(name="optim/step/a", box=Box((), ()), dtype="int64").title == "optim/step/a[]"


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(1, 9)), max_size=12))
def test_pieces_follow_without_a_gap_and_each_starts_at_a_multiple_of_its_entries(sizes):
    slots = [
        FileEntry(name=f"model/t{i}", box=Box((0,), (length,)), dtype=dtype)
        for i, (dtype, length) in enumerate(sizes)
    ]
    slots.sort(key=write_order)
    layout = lay_out(slots)
    assert len(layout.header) % ALIGNMENT == 0
    actual = int.from_bytes(layout.header[:8], "little")
    assert actual == len(layout.header) - 8
    ends = [at + slot.num_bytes for at, slot in zip(layout.offsets, slots, strict=True)]
    actual = [len(layout.header), *ends]
    assert actual == [*layout.offsets, layout.num_bytes]
    assert all(
        at % DTYPES[slot.dtype][1] == 0 for at, slot in zip(layout.offsets, slots, strict=True)
    )


def test_equal_checkpoints_have_equal_bytes(tmp_path):
    first, second = (save(tmp_path / name, small_state(), ranks=2, seed=1) for name in "ab")
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_the_manifest_is_canonical_and_its_checksum_is_that_of_sha256sum(tmp_path):
    path = save(tmp_path, small_state())
    text = (path / MANIFEST).read_bytes()
    manifest = Manifest.model_validate_json(text)
    assert manifest.to_json().encode() == text
    digest = hashlib.sha256(text).hexdigest()
    assert (path / DIGEST).read_text() == f"{digest}  {MANIFEST}\n"
    assert json.loads(text)["facts"] == json.loads(facts_of(1).to_json())


def test_every_byte_of_the_data_files_belongs_to_a_header_or_to_one_piece(tmp_path):
    path = save(tmp_path, small_state(), ranks=3)
    manifest = open_checkpoint(path).manifest
    owned = {name: file.header_bytes for name, file in manifest.files.items()}
    for stored in manifest.tensors.values():
        for piece in stored.pieces:
            owned[piece.file] += stored.num_bytes(piece)
    expected = {name: file.num_bytes for name, file in manifest.files.items()}
    assert owned == expected


def test_sections_hold_the_names_below_them(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, small_state()))
    assert checkpoint.sections == ("model", "optim/exp_avg", "optim/step")
    assert set(checkpoint.section("model").shapes) == {
        "embed.weight",
        "head.weight",
        "layer0.router.bias",
        "none.weight",
    }
    assert set(checkpoint.section("optim/step").shapes) == {"embed.weight"}
    assert checkpoint.section("optim").shapes == {}
    assert isinstance(checkpoint.manifest.tensors["model/embed.weight"], Stored)


def test_what_needs_no_tensor_needs_no_torch():
    modules = ("coverage", "data_file", "disk", "folder", "format", "manifest", "resume")
    code = f"import sys; {'; '.join(f'import weft.checkpoint.{name}' for name in modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def counted(whole: Box, boxes) -> np.ndarray:
    """In how many boxes each entry of `whole` is."""
    times = np.zeros(whole.shape, dtype=int)
    for box in boxes:
        times[box.within(whole)] += 1
    return times


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**32))
def test_boxes_cover_a_whole_exactly_where_counting_says_so(shape, seed):
    chance = random.Random(seed)
    whole = Box(lo=tuple(chance.randrange(3) for _ in shape), hi=())
    whole = Box(
        lo=whole.lo, hi=tuple(lo + length for lo, length in zip(whole.lo, shape, strict=True))
    )
    if whole.size:
        boxes = list(cut(whole, chance))
    else:
        boxes = []
    if boxes and chance.random() < 0.7:
        index = chance.randrange(len(boxes))
        if chance.random() < 0.5:
            boxes = boxes[:index] + boxes[index + 1 :]
        else:
            boxes = [*boxes, boxes[index]]
    chance.shuffle(boxes)
    flaw = coverage_flaw(whole, boxes)
    times = counted(whole, boxes)
    assert (flaw is None) == bool((times == 1).all())
    if flaw:
        inside = times[flaw.box.within(whole)]
        assert inside.size
        assert (inside == 0).all() if flaw.kind == "gap" else (inside > 1).all()


def test_a_grid_of_thousands_of_pieces_is_judged_in_a_moment():
    whole = Box.whole((300, 300))
    boxes = []
    for i, j in itertools.product(range(0, 300, 5), repeat=2):
        boxes.append(Box(lo=(i, j), hi=(i + 5, j + 5)))
    assert coverage_flaw(whole, boxes) is None
    assert str(coverage_flaw(whole, boxes[:-1])) == "entries [295:300, 295:300] are in no piece"
    assert (
        str(coverage_flaw(whole, [*boxes, Box((7, 7), (8, 8))]))
        == "entries [7:8, 7:8] are in more than one piece"
    )
