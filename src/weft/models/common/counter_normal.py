"""Normal random numbers by counter: each element is a function of a key and its index, on any device, for any slice.

Note [Counter-based numbers]
    A rank draws exactly the entries of the shard that it holds, on its own device, and every layout
    gets the same bits. So only operations whose result IEEE 754 and two's complement define are
    used: integer arithmetic, a table look-up, one addition and one multiplication of float32
    numbers; no logarithm or cosine, which differ between devices.

    - An entry at [..., column] belongs to the row of its leading indices. Two rounds of SplitMix64's
      finalizer (Steele et al. 2014) turn (key, row) into three 32-bit row keys; a 32-bit
      multiply-xorshift hash, with a row key mixed in before each round, turns the column into 32
      bits.
    - Each half of the 32 bits selects one of 65,536 quantiles of a normal distribution. The sum of
      both has variance 1, kurtosis 3 to three digits, and reaches 6 standard deviations.

    One core draws 110 to 150 million numbers a second; torch's own generator, which cannot start in
    the middle of a tensor, 290 million (docs/LOG.md).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.axes import Box

NUM_QUANTILES = 2**16
CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are drawn at a time: on a CPU the temporaries stay in the cache."""
MAX_COLUMNS = 2**15
"""A longer last dim is drawn in pieces, so that a chunk has bounded size."""

_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_64_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_64_2 = 0x94D049BB133111EB - 2**64
_GOLDEN_32 = 0x9E3779B1 - 2**32
_MULTIPLIER_32_1 = 0x7FEB352D
_MULTIPLIER_32_2 = 0x846CA68B - 2**32


def normal_entries(
    key: int, shape: tuple[int, ...], box: Box, *, std: float, device: torch.device
) -> Tensor:
    """The entries of one box of a tensor of normal numbers with mean 0.

    Args:
        key: 64 bits that select the tensor.
        shape: of the whole tensor.
        box: the entries to draw.
        std: standard deviation.

    Returns:
        float32 tensor with the shape of the box, on `device`; without values on the meta device.
    """
    if device.type == "meta":
        return torch.empty(box.shape, dtype=torch.float32, device=device)
    if not shape:
        entries = normal_entries(key, (1,), Box.whole((1,)), std=std, device=device)
        return entries.reshape(())
    first_column = box.lo[-1]
    num_columns = box.hi[-1] - first_column
    rows = _row_numbers(shape, box, device)
    num_rows = len(rows)
    values = torch.empty((num_rows, num_columns), dtype=torch.float32, device=device)
    table = torch.from_numpy(_quantiles()).to(device)
    scale = torch.tensor(std, dtype=torch.float32, device=device)
    row_keys = _row_keys(rows, key)
    for chosen_rows, columns in _chunks(num_rows, num_columns, device):
        numbers = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=device)
        keys = row_keys[:, chosen_rows, None]
        bits = _hash_columns(numbers + first_column, keys)
        normal = _sum_of_quantiles(bits, table)
        values[chosen_rows, columns] = normal * scale
    return values.reshape(box.shape)


def _row_numbers(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Number of each row of a box within the whole tensor, in order, int64."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, length in enumerate(shape[:-1]):
        places = torch.arange(box.lo[dim], box.hi[dim], dtype=torch.int64, device=device)
        first_of_outer = numbers[:, None] * length
        numbers = (first_of_outer + places).flatten()
    return numbers


def _chunks(num_rows: int, num_columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the pieces in which a box is drawn."""
    if num_rows == 0 or num_columns == 0:
        return
    columns_at_a_time = min(num_columns, MAX_COLUMNS)
    rows_at_a_time = CHUNK_ELEMENTS[device.type] // columns_at_a_time
    for rows in _runs(num_rows, max(1, rows_at_a_time)):
        for columns in _runs(num_columns, columns_at_a_time):
            yield rows, columns


def _runs(length: int, at_a_time: int) -> Iterator[slice]:
    """Consecutive runs of so many entries; the last one may be shorter."""
    for start in range(0, length, at_a_time):
        stop = min(start + at_a_time, length)
        yield slice(start, stop)


def _row_keys(rows: Tensor, key: int) -> Tensor:
    """Three independent 32-bit keys of each row: int32 [3, rows]."""
    signed_key = (key + 2**63) % 2**64 - 2**63
    first_word = _hash_64(rows * _GOLDEN_64 + signed_key)
    second_word = _hash_64(first_word + _GOLDEN_64)
    halves = torch.stack([first_word, second_word]).view(torch.int32)
    words = halves.view(2, -1, 2)
    first_words, second_words = words
    keys = [first_words[:, 0], first_words[:, 1], second_words[:, 0]]
    return torch.stack(keys)


def _hash_64(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, on int64; the masks make its shifts logical."""
    high = (words >> 30) & (2**34 - 1)
    words = (words ^ high) * _MULTIPLIER_64_1
    high = (words >> 27) & (2**37 - 1)
    words = (words ^ high) * _MULTIPLIER_64_2
    high = (words >> 31) & (2**33 - 1)
    return words ^ high


def _hash_columns(columns: Tensor, keys: Tensor) -> Tensor:
    """32 bits for each row and column, int32 [rows, columns]; see Note [Counter-based numbers]."""
    first_key, second_key, third_key = keys
    words = columns.to(torch.int32) * _GOLDEN_32 + first_key
    words ^= (words >> 16) & 0xFFFF
    words *= _MULTIPLIER_32_1
    words ^= second_key
    words ^= (words >> 15) & 0x1FFFF
    words *= _MULTIPLIER_32_2
    words ^= third_key
    hashed: Tensor = words ^ ((words >> 16) & 0xFFFF)
    return hashed


def _sum_of_quantiles(bits: Tensor, table: Tensor) -> Tensor:
    """The number that 32 bits stand for, float32 with the shape of `bits`."""
    halves = bits.view(torch.int16).to(torch.int32)
    halves += NUM_QUANTILES // 2
    places = halves.flatten()
    quantiles = torch.index_select(table, 0, places)
    first, second = quantiles.view(-1, 2).unbind(1)
    values: Tensor = first + second
    return values.view(bits.shape)


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    """Centres of 65,536 equally likely intervals of a normal distribution, scaled to variance 1/2.

    They are rounded to multiples of 2^-24, so that the last bit of a machine's logarithm does not
    show.
    """
    normal = statistics.NormalDist()
    centres = np.arange(NUM_QUANTILES // 2) + 0.5
    probabilities = centres / NUM_QUANTILES
    lower = np.array([normal.inv_cdf(each) for each in probabilities.tolist()])
    squares = lower * lower
    sum_of_squares = math.fsum(squares.tolist())
    mean_square = 2 * sum_of_squares / NUM_QUANTILES
    scale = 1 / math.sqrt(2 * mean_square)
    multiples = np.rint(lower * scale * 2**24)
    below_zero = multiples / 2**24
    above_zero = -below_zero[::-1]
    table = np.concatenate((below_zero, above_zero))
    return table.astype(np.float32)
