"""Damaged checkpoints: one flipped bit in any file is detected, and so is any truncation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.states import save, small_state
from weft.checkpoint.format import DIGEST, MANIFEST
from weft.checkpoint.read import open_checkpoint
from weft.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fast_disk")

KINDS = ("manifest", "checksum", "length of a header", "header", "padding of a header", "data")


@pytest.fixture(scope="module")
def path(tmp_path_factory, fast_disk):
    return save(tmp_path_factory.mktemp("run"), small_state(), ranks=2, seed=4)


def whole(path: Path) -> bool:
    try:
        open_checkpoint(path).verify()
    except CheckpointError as error:
        return str(path) not in str(error)  # a fault that does not name the file does not count
    return True


def places(path: Path, kind: str) -> list[tuple[Path, int, int]]:
    """Where bytes of one kind lie: file, first byte, last byte + 1."""
    if kind in ("manifest", "checksum"):
        file = path / (MANIFEST if kind == "manifest" else DIGEST)
        return [(file, 0, file.stat().st_size)]
    found = []
    for name, facts in open_checkpoint(path).manifest.files.items():
        padding = len((path / name).read_bytes()[: facts.header_bytes].rstrip(b" "))
        found.append(
            {
                "length of a header": (path / name, 0, 8),
                "header": (path / name, 8, padding),
                "padding of a header": (path / name, padding, facts.header_bytes),
                "data": (path / name, facts.header_bytes, facts.num_bytes),
            }[kind]
        )
    return found


def random_bits(path: Path, count: int, seed: int) -> Iterator[tuple[str, Path, int]]:
    """Bits of all kinds in turn: kind, file, number of the bit."""
    chance = random.Random(seed)
    by_kind = {kind: places(path, kind) for kind in KINDS}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        not_empty = [place for place in by_kind[kind] if place[1] < place[2]]
        file, start, stop = chance.choice(not_empty)
        yield kind, file, chance.randrange(8 * start, 8 * stop)


def test_a_thousand_of_a_thousand_flipped_bits_of_every_kind_are_found(path):
    assert whole(path)
    found = Counter[str]()
    missed = []
    for kind, file, bit in random_bits(path, 1000, seed=20):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        if whole(path):
            missed.append((kind, file.name, bit))
        found[kind] += 1
        file.write_bytes(content)
    assert not missed
    assert set(found) == set(KINDS)
    assert sum(found.values()) == 1000
    assert whole(path)


def test_any_truncation_of_any_file_is_found(path):
    chance = random.Random(7)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for length in (
            0,
            1,
            7,
            len(content) - 1,
            *(chance.randrange(len(content)) for _ in range(6)),
        ):
            file.write_bytes(content[:length])
            assert not whole(path), (file.name, length)
        file.unlink()
        assert not whole(path), f"{file.name} is missing"
        file.write_bytes(content)
    assert whole(path)


def test_a_block_of_zeros_is_found_wherever_it_is(path):
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for start in range(0, len(content) - 16, 61):
            file.write_bytes(content[:start] + bytes(16) + content[start + 16 :])
            was_zero = content[start : start + 16] == bytes(16)
            assert was_zero or not whole(path), (file.name, start)
        file.write_bytes(content)
