"""Owns which samples a step takes and which rank and micro-batch gets them: pure functions of (seed, step).

Note [Order without a table]. An epoch's permutation is a Feistel network over the sample numbers, walked until it lands
inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). So sample `i` of an epoch costs the same where
there are a hundred samples as where there are a trillion, nothing is kept, and no library's version decides the order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

NUM_ROUNDS = 8
DRAWS = 0x64726177
"""Sets the seed of draws apart from those of epochs."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def samples_of_step(step: int, *, global_size: int, num_samples: int, seed: int) -> Ints:
    """Samples of step `step` (from 0), in the order in which `layout_of` deals them out.

    Steps follow each other without a gap: where an epoch ends inside a step, the next epoch's permutation goes on.
    """
    return walk(places_of_step(step, global_size), num_samples, seed=seed)


def places_of_step(step: int, global_size: int) -> Ints:
    """Places of a step's samples in the walk of the whole run."""
    return np.arange(step * global_size, (step + 1) * global_size, dtype=np.int64)


def walk(places: Ints, num_samples: int, *, seed: int) -> Ints:
    """Samples at these places of a walk through epoch after epoch, each in its own order."""
    epochs, inside = np.divmod(places, num_samples)
    samples = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        samples[chosen] = permuted(inside[chosen], num_samples, key=mix(seed, int(epoch)))
    return samples


def draws(numbers: Ints, *, seed: int) -> NDArray[np.float64]:
    """For each number one that is drawn evenly from [0, 1), a function of seed and number alone."""
    words = numbers.astype(np.uint64) + np.uint64(1)
    words = _scrambled(_scrambled(words * np.uint64(_GOLDEN)) + np.uint64(mix(seed, DRAWS)))
    return (words >> np.uint64(11)).astype(np.float64) / 2**53


def layout_of(samples: Ints, *, index: int, degree: int, micro_size: int) -> Ints:
    """Samples of data rank `index` of `degree`, as [micro-batch, place]: j = (m * degree + index) * micro_size + i."""
    return samples.reshape(-1, degree, micro_size)[:, index]


def permuted(places: Ints, length: int, *, key: int) -> Ints:
    """Where a permutation of `length` numbers, chosen by `key`, sends `places`; see Note [Order without a table]."""
    half_bits = np.uint64(max(1, (max(length - 1, 1).bit_length() + 1) // 2))
    round_keys = [np.uint64(mix(key, number)) for number in range(NUM_ROUNDS)]
    result = places.astype(np.uint64)
    walking = np.ones(len(result), dtype=bool)
    while walking.any():
        result[walking] = _feistel(result[walking], half_bits, round_keys)
        walking = result >= np.uint64(length)
    return result.astype(np.int64)


def _feistel(numbers: _Words, half_bits: np.uint64, round_keys: list[np.uint64]) -> _Words:
    low_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = numbers >> half_bits, numbers & low_mask
    for round_key in round_keys:
        left, right = right, left ^ (_scrambled(right + round_key) & low_mask)
    return (left << half_bits) | right


def _scrambled(words: _Words) -> _Words:
    """SplitMix64's finisher (Steele et al. 2014): every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mix(*numbers: int) -> int:
    """One 64-bit word out of several numbers."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        word = _scrambled(word + np.uint64((number + 1) * _GOLDEN & _MASK))
    return int(word[0])
