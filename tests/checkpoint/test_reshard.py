"""Resharding: tensors written in any boxes are read in any other boxes, bit for bit."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.states import DTYPES, bits, cut, same_bits, save
from weft.checkpoint import commit, data_file, write
from weft.checkpoint.read import open_checkpoint
from weft.core.axes import Box

pytestmark = pytest.mark.usefixtures("fast_disk")

UNCUT = next(seed for seed in range(99) if random.Random(seed).random() < 0.2)
"""A seed with which `states.cut` leaves the first tensor whole."""

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def check_any_cut(folder: Path, state, *, ranks: int, seed: int) -> None:
    checkpoint = open_checkpoint(save(folder, state, ranks=ranks, seed=seed))
    chance = random.Random(seed + 1)
    for name, tensor in state.items():
        section, _, parameter = name.rpartition("/")
        source = checkpoint.section(section)
        assert source.shapes[parameter] == tuple(tensor.shape)
        assert source.dtype(parameter) == tensor.dtype
        for box in cut(Box.whole(tensor.shape), chance):
            assert same_bits(source.read(parameter, box), tensor[box.slices]), (name, box)
    checkpoint.verify()


CASES = given(
    shapes=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@CASES
def test_any_cut_of_random_tensors_is_read_back_by_any_other_cut(shapes, ranks, seed):
    check_case(shapes, ranks, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=3000, suppress_health_check=[HealthCheck.too_slow])
@CASES
def test_many_cuts_of_random_tensors_are_read_back_by_any_other_cut(shapes, ranks, seed):
    check_case(shapes, ranks, seed)


def check_case(shapes, ranks, seed):
    state = {
        f"model/t{i}": bits(shape, dtype=dtype, seed=i) for i, (shape, dtype) in enumerate(shapes)
    }
    with tempfile.TemporaryDirectory() as folder:
        check_any_cut(Path(folder), state, ranks=ranks, seed=seed)


@pytest.mark.parametrize("block_bytes", [8, 24, 1000])
def test_pieces_of_many_blocks_are_read_back_by_any_cut(block_bytes, tmp_path, monkeypatch):
    for module in (write, commit):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    state = {
        "model/a": bits((13, 7), dtype=torch.float32, seed=1),
        "optim/x/a": bits((5, 3, 4), dtype=torch.bfloat16, seed=2),
    }
    for seed in range(10):
        folder = tmp_path / str(seed)
        check_any_cut(folder, state, ranks=3, seed=seed)


def test_reading_some_rows_checks_the_blocks_of_those_rows_only(tmp_path, monkeypatch):
    for module in (write, commit):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    rows = torch.arange(64.0).view(16, 4)  # a row has 16 bytes, a block four rows
    checkpoint = open_checkpoint(save(tmp_path, {"model/a": rows}, ranks=1, seed=UNCUT))
    (piece,) = checkpoint.manifest.tensors["model/a"].pieces
    seen: list[int] = []
    monkeypatch.setattr(data_file.zlib, "crc32", counted(data_file.zlib.crc32, seen))
    source = checkpoint.section("model")
    box = Box((5, 1), (9, 2))
    actual = source.read("a", box)
    expected = rows[5:9, 1:2]
    assert torch.equal(actual, expected)
    header = checkpoint.manifest.files[piece.file].header_bytes
    assert seen == [header, 64, 64]
    source.read("a", Box((4, 0), (8, 4)))
    assert seen == [header, 64, 64], "what has been checked once is not checked again"


def counted(crc32, seen):
    def crc(data, *rest):
        seen.append(len(data))
        return crc32(data, *rest)

    return crc


def test_a_file_that_is_not_needed_is_not_opened(tmp_path):
    state = {}
    for index in range(8):
        state[f"model/t{index}"] = torch.full((4,), float(index))
    path = save(tmp_path, state, ranks=2, seed=UNCUT)
    checkpoint = open_checkpoint(path)
    (piece,) = checkpoint.manifest.tensors["model/t0"].pieces
    (other,) = set(checkpoint.manifest.files) - {piece.file}
    (path / other).unlink()
    actual = checkpoint.section("model").read("t0", Box((1,), (3,)))
    assert torch.equal(actual, torch.zeros(2))


def test_what_is_read_is_memory_of_its_own(tmp_path):
    path = save(tmp_path, {"model/a": torch.ones(8)}, ranks=1)
    checkpoint = open_checkpoint(path)
    before = {file: (path / file).read_bytes() for file in checkpoint.manifest.files}
    checkpoint.section("model").read("a", Box((0,), (8,))).zero_()
    actual = checkpoint.section("model").read("a", Box((0,), (8,)))
    assert torch.equal(actual, torch.ones(8))
    assert {file: (path / file).read_bytes() for file in before} == before
