"""NF4: levels as published, bytes as bitsandbytes writes them, shards that are parts of the whole, 4.5 bits a weight."""

from __future__ import annotations

import pytest
import torch

from weft.models.common.nf4 import nf4_levels, pack, packed_width, unpack, unpacked_width
from weft.prove.plain_nf4 import LEVELS


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.02


def test_levels_are_the_published_ones() -> None:
    assert torch.equal(nf4_levels(), torch.tensor(LEVELS))


def test_bytes_are_codes_of_two_entries_then_the_largest_magnitudes() -> None:
    line = torch.zeros(1, 66)
    line[0, :4] = torch.tensor([-2.0, 2.0, 0.5, 0.0])  # of the first block: levels 0, 15, 10, 7
    line[0, 64:] = torch.tensor([0.25, -0.05])  # of the second: 1 and -0.2, next to -0.1848
    packed = pack(line, dim=1)
    assert packed.shape == (1, 33 + 8)
    assert packed[0, :2].tolist() == [0x0F, 0xA7]
    assert packed[0, 32] == 0xF5
    assert packed[0, 33:].clone().view(torch.float32).tolist() == [2.0, 0.25]
    levels = torch.tensor(LEVELS)
    assert unpack(packed, dim=1)[0, :3].tolist() == [-2.0, 2.0, float(levels[10] * 2)]
    assert unpack(packed, dim=1)[0, 65] == levels[5] * 0.25


def test_bytes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = matrix(100, 192)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = pack(weight, dim=1)
    assert torch.equal(packed[:, :96].flatten(), codes.flatten())
    assert torch.equal(unpack(packed, dim=1), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantizing_what_was_dequantized_changes_nothing(
    dim: int, dtype: torch.dtype, double: bool
) -> None:
    packed = pack(matrix(150, 98), dim=dim, double=double)
    again = unpack(packed, dim=dim, double=double).to(dtype)
    assert torch.equal(pack(again, dim=dim, double=double), packed)


def test_shares_are_of_the_largest_of_256_blocks() -> None:
    """The codes are those without double quantization."""
    weight = matrix(3, 64 * 300)
    packed = pack(weight, dim=1, double=True)
    num_codes = 32 * 300
    assert packed.shape == (3, num_codes + 300 + 2 * 4)
    assert torch.equal(packed[:, :num_codes], pack(weight, dim=1)[:, :num_codes])
    absmax = weight.unflatten(1, (300, 64)).abs().amax(-1)
    largest = torch.stack([absmax[:, :256].amax(1), absmax[:, 256:].amax(1)], 1)
    assert torch.equal(packed[:, -8:].clone().view(torch.float32), largest)
    shares = packed[:, num_codes:-8].float() / 255
    kept = shares * largest.repeat_interleave(256, 1)[:, :300]
    assert (kept - absmax).abs().max() <= largest.max() / 510 * (1 + 1e-6)
    entries = unpack(packed, dim=1, double=True).unflatten(1, (300, 64)).abs().amax(-1)
    assert torch.equal(entries, kept)


@pytest.mark.parametrize("length", [2, 62, 64, 66, 64 * 256, 64 * 256 + 2, 64 * 600 - 2])
def test_the_length_of_a_line_follows_from_its_bytes(length: int) -> None:
    for double in (False, True):
        assert unpacked_width(packed_width(length, double=double), double=double) == length
    assert packed_width(64 * 256, double=True) * 8 == 4.126953125 * 64 * 256


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_the_lines_is_a_part_of_the_bytes(dim: int) -> None:
    weight = matrix(150, 98)
    start, length = 13, 40
    part = pack(weight.narrow(1 - dim, start, length), dim=dim)
    assert torch.equal(part, pack(weight, dim=dim)[start : start + length])


def test_a_block_of_zeros_stays_zero_and_nan_stays_nan() -> None:
    weight = matrix(2, 128)
    weight[0, :64] = 0
    weight[1, 3] = float("nan")
    found = unpack(pack(weight, dim=1), dim=1)
    assert not found[0, :64].any()
    assert found[1, :64].isnan().all()
    assert found[:, 64:].isfinite().all()


def test_a_weight_needs_four_and_a_half_bits() -> None:
    assert packed_width(4096) * 8 == 4.5 * 4096
    assert [unpacked_width(packed_width(length)) for length in (2, 62, 64, 66, 190)] == [
        2,
        62,
        64,
        66,
        190,
    ]
