"""Digests of tensors as they are in memory: those of disjoint boxes add up to that of the whole tensor, whatever the layout.

Note [Digests of tensors]
    A checksum of a file says that its bytes are those that were written, not that they are those of
    the right entries. So every rank also digests the entries that it holds, and the sums over the
    ranks are in the manifest; after a load, on any layout, they are computed again and compared.

    The digest of a tensor is a sum over its entries modulo 2^32: the bits of an entry as a whole
    number, whose high bits are mixed into the low ones (or a sign that changes in an even number of
    entries would cancel), times an odd multiplier for each of its coordinates. One changed entry
    always changes it; any other change is missed with a probability of about 2^-32. Entries of
    eight bytes count as two.

    The boxes, their offsets and the share of each replica are computed apart from those of the
    pieces that are written (`ParamState.write_range`), or a fault there would be in both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.core.axes import Box

MODULUS = 2**32
SALT = 0x1E3779B1
FINALISER = ((16, 0x05EBCA6B), (13, 0x42B2AE35))
"""Shift and multiplier of each round; all arithmetic here wraps around at 32 bits."""
CHUNK_ENTRIES = 2**16
"""Entries that are multiplied at once: they stay in a processor's cache."""
CHUNK_ENTRIES_ON_GPU = 2**22
WORDS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Bytes of an entry -> the whole numbers that are multiplied."""


def digest_of_box(values: Tensor, box: Box) -> Tensor:
    """Digest of the entries of `box` in a tensor: one whole number on their device, modulo 2^32
    after conversion.

    Args:
        values: the entries, in the shape of the box or flat.
    """
    item_bytes = values.element_size()
    words = values.detach().contiguous().view(-1).view(WORDS[item_bytes])
    ranges = list(zip(box.lo, box.hi, strict=True)) or [(0, 1)]
    if item_bytes == 8:
        lo, hi = ranges[-1]
        ranges[-1] = (2 * lo, 2 * hi)
    split = _num_row_dims(ranges)
    row_multipliers = _multipliers(ranges, 0, split, device=values.device)
    multipliers = _multipliers(ranges, split, len(ranges), device=values.device)
    num_columns = multipliers.numel()
    rows = words.view(-1, num_columns)
    chunk_entries = CHUNK_ENTRIES_ON_GPU if values.is_cuda else CHUNK_ENTRIES
    step = max(1, chunk_entries // num_columns)
    row_sums = [_row_sums(chunk, multipliers) for chunk in rows.split(step)]
    return (torch.cat(row_sums) * row_multipliers).sum()


def _row_sums(rows: Tensor, multipliers: Tensor) -> Tensor:
    """The sum of every row's entries times the multipliers of their columns."""
    mixed = (rows >> 15).bitwise_xor_(rows)
    if mixed.dtype == torch.int32:
        products = mixed.mul_(multipliers)
    else:
        products = mixed * multipliers
    return products.sum(1, dtype=torch.int32)


def _num_row_dims(ranges: list[tuple[int, int]]) -> int:
    """How many dims are rows: the others, of at most CHUNK_ENTRIES, make up one row."""
    split = len(ranges) - 1
    while split > 0:
        num_columns = math.prod(hi - lo for lo, hi in ranges[split - 1 :])
        if num_columns > CHUNK_ENTRIES:
            break
        split -= 1
    return split


def _multipliers(
    ranges: list[tuple[int, int]], first: int, stop: int, *, device: torch.device
) -> Tensor:
    """The product of the multipliers of some dims, flat, row-major."""
    product = torch.ones(1, dtype=torch.int32, device=device)
    for dim in range(first, stop):
        lo, hi = ranges[dim]
        of_dim = _odd_hash(torch.arange(lo, hi, dtype=torch.int32, device=device), salt=dim + 1)
        product = (product[:, None] * of_dim).view(-1)
    return product


def _odd_hash(numbers: Tensor, *, salt: int) -> Tensor:
    """An odd number for each number and salt, in 32 bits (the finaliser of MurmurHash3)."""
    mixed = numbers + SALT * salt % 2**31
    for shift, multiplier in FINALISER:
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return (mixed ^ (mixed >> 16)) | 1
