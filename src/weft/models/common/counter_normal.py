"""Normal random numbers by counter: each element is a function of a key and its index, on any device, for any slice.

Note [Counter-based numbers]
    A rank draws exactly the entries of the shard that it holds, on its own device, and every layout
    gets the same bits. So only operations whose result IEEE 754 and two's complement define are
    used: integer arithmetic, a table look-up, one addition and one multiplication of float32
    numbers; no logarithm or cosine, which differ between devices.

    - An entry at [..., column] belongs to the row of its leading indices; key, row and column are
      hashed to 32 bits: see Note [Counter-based bits] in counter_hash.py.
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
from weft.models.common.counter_hash import hash_columns, row_keys_of

NUM_QUANTILES = 2**16
CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are drawn at a time: on a CPU the temporaries stay in the cache."""
MAX_COLUMNS = 2**15
"""A longer last dim is drawn in pieces, so that a chunk has bounded size."""


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
    row_keys = row_keys_of(rows, key)
    for chosen_rows, columns in _chunks(num_rows, num_columns, device):
        numbers = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=device)
        keys = row_keys[:, chosen_rows, None]
        bits = hash_columns(numbers + first_column, keys)
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


def _sum_of_quantiles(bits: Tensor, table: Tensor) -> Tensor:
    """The number that 32 bits stand for, float32 with the shape of `bits`."""
    # both halves of each word, the lower one first
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
    # exact in float32 from here on: sums and products of the table are the same on all devices
    multiples = np.rint(lower * scale * 2**24)
    below_zero = multiples / 2**24
    # mirrored, so that the mean is 0 exactly
    above_zero = -below_zero[::-1]
    table = np.concatenate((below_zero, above_zero))
    return table.astype(np.float32)
