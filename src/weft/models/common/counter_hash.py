"""Random bits by counter: 32 bits that are a function of a key, a row and a column, on any device, for any slice.

Note [Counter-based bits]
    Two rounds of SplitMix64's finalizer (Steele et al. 2014) turn (key, row) into three 32-bit row
    keys; a 32-bit multiply-xorshift hash, with a row key mixed in before each round, turns the
    column into 32 bits. Integer arithmetic in two's complement alone, which all devices define
    alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_64_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_64_2 = 0x94D049BB133111EB - 2**64
_GOLDEN_32 = 0x9E3779B1 - 2**32
_MULTIPLIER_32_1 = 0x7FEB352D
_MULTIPLIER_32_2 = 0x846CA68B - 2**32


def signed(word: int) -> int:
    """64 bits as the int64 of the same bits."""
    return (word + 2**63) % 2**64 - 2**63


def row_keys_of(rows: Tensor, key: int | Tensor) -> Tensor:
    """Three independent 32-bit keys of each row: int32 [3, ...rows].

    Args:
        rows: numbers of rows, int64.
        key: 64 bits that select the numbers; or one such int64 for each row.
    """
    signed_key = signed(key) if isinstance(key, int) else key
    first_word = hash_64(rows * GOLDEN_64 + signed_key)
    second_word = hash_64(first_word + GOLDEN_64)
    # the bits as they lie in memory: all supported machines have the lower half first
    halves = torch.stack([first_word, second_word]).unsqueeze(-1).view(torch.int32)
    first_words, second_words = halves
    keys = [first_words[..., 0], first_words[..., 1], second_words[..., 0]]
    return torch.stack(keys)


def hash_64(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, on int64; the masks make its shifts logical."""
    high = (words >> 30) & (2**34 - 1)
    words = (words ^ high) * _MULTIPLIER_64_1
    high = (words >> 27) & (2**37 - 1)
    words = (words ^ high) * _MULTIPLIER_64_2
    high = (words >> 31) & (2**33 - 1)
    return words ^ high


def hash_columns(columns: Tensor, keys: Tensor) -> Tensor:
    """32 bits for each row and column, int32 [rows, columns]; see Note [Counter-based bits].

    Args:
        columns: their numbers.
        keys: int32 [3, rows, 1].
    """
    first_key, second_key, third_key = keys
    words = columns.to(torch.int32) * _GOLDEN_32 + first_key
    # the shift of signed numbers brings ones in from the left; the mask makes it that of unsigned ones
    words ^= (words >> 16) & 0xFFFF
    words *= _MULTIPLIER_32_1
    words ^= second_key
    words ^= (words >> 15) & 0x1FFFF
    words *= _MULTIPLIER_32_2
    words ^= third_key
    hashed: Tensor = words ^ ((words >> 16) & 0xFFFF)
    return hashed
