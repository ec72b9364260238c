"""The order of samples: which samples a step uses, and which rank and micro-batch gets them; functions of (seed, step).

Note [Order without a table]
    An epoch's permutation is a Feistel network over the sample numbers, applied until the result is
    a sample number (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    So sample `i` of an epoch costs the same for a hundred samples as for a trillion, no table is
    stored, and the order does not depend on the version of any library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]
Order = Literal["shuffled", "stored"]
"""Of the samples in an epoch: see `epoch_order`."""

NUM_ROUNDS = 8
UNIFORM_KEY = 0x64726177
"""Makes the seed of `uniform_draws` differ from those of epochs."""
DRAW_KEY = 0x64726F70
"""Makes the seed of `draw_keys` differ from those of epochs."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def samples_of_step(step: int, *, global_size: int, num_samples: int, seed: int) -> Ints:
    """Samples of step `step` (from 0), in the order that `layout_of` distributes.

    Steps follow each other without a gap: where an epoch ends inside a step, the next epoch's
    permutation continues.
    """
    places = places_of_step(step, global_size)
    return epoch_order(places, num_samples, seed=seed)


def places_of_step(step: int, global_size: int) -> Ints:
    """Places of a step's samples in the order of the whole run."""
    start = step * global_size
    stop = start + global_size
    return np.arange(start, stop, dtype=np.int64)


def batch_of_step(step: int, skipped: Sequence[int] = ()) -> int:
    """Number of the batch that step `step` (from 0) trains on: the batches in order, without those
    of the ascending numbers `skipped`.
    """
    batch = step
    for number in skipped:
        # ascending: each skipped batch before moves the next ones on by one, itself included
        if number <= batch:
            batch += 1
    return batch


def epoch_order(places: Ints, num_samples: int, *, seed: int, order: Order = "shuffled") -> Ints:
    """Samples at these places of a run that goes through epoch after epoch, each in its own order, or
    all in that of the samples.
    """
    epochs, inside = np.divmod(places, num_samples)
    if order == "stored":
        return inside
    samples = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(epochs):
        key = hash_numbers(seed, int(epoch))
        # a step that spans the end of an epoch takes places of two permutations
        in_epoch = epochs == epoch
        places_in_epoch = inside[in_epoch]
        samples[in_epoch] = permuted(places_in_epoch, num_samples, key=key)
    return samples


def uniform_draws(numbers: Ints, *, seed: int) -> NDArray[np.float64]:
    """For each number a uniform draw from [0, 1), a function of seed and number alone."""
    one = np.uint64(1)
    key = np.uint64(hash_numbers(seed, UNIFORM_KEY))
    increments = numbers.astype(np.uint64) + one
    states = increments * np.uint64(_GOLDEN_RATIO)
    words = _hashed(_hashed(states) + key)
    highest_53_bits = words >> np.uint64(11)
    fractions = highest_53_bits.astype(np.float64)
    return fractions / 2**53


def draw_keys(places: Ints, *, seed: int) -> Ints:
    """A 64-bit key of random numbers for each sequence, by its place in the order of the whole run."""
    key = np.uint64(hash_numbers(seed, DRAW_KEY))
    increments = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_RATIO)
    return _hashed(_hashed(increments) + key).view(np.int64)


def layout_of(samples: Ints, *, index: int, degree: int, micro_size: int, outer: int = 1) -> Ints:
    """Samples of data rank `index` of `degree`, as [micro-batch, place]: j = (m * degree + index) *
    micro_size + i.

    Args:
        outer: groups of data ranks that take consecutive micro-batches each; with all ranks in
            groups of one, j = (index * micro-batches + m) * micro_size + i.
    """
    inner = degree // outer
    by_rank = samples.reshape(outer, -1, inner, micro_size)
    return by_rank[index // inner, :, index % inner]


def permuted(places: Ints, length: int, *, key: int) -> Ints:
    """Images of `places` under the permutation of `length` numbers that `key` chooses; see Note
    [Order without a table].
    """
    num_bits = max(length - 1, 1).bit_length()
    half_bits = np.uint64((num_bits + 1) // 2)
    round_keys: list[np.uint64] = []
    for number in range(NUM_ROUNDS):
        # a key for each round: with equal ones, left and right halves would be mixed alike every second time
        round_key = hash_numbers(key, number)
        round_keys.append(np.uint64(round_key))
    images = places.astype(np.uint64)
    is_outside = np.ones(len(images), dtype=bool)
    while is_outside.any():
        outside = images[is_outside]
        # the network permutes a power of four above `length`; walking on from what is outside ends
        # inside, since the walk is a cycle that began inside, and no two numbers meet on it
        images[is_outside] = _feistel(outside, half_bits, round_keys)
        is_outside = images >= np.uint64(length)
    return images.astype(np.int64)


def _feistel(numbers: _Words, half_bits: np.uint64, round_keys: list[np.uint64]) -> _Words:
    one = np.uint64(1)
    low_mask = (one << half_bits) - one
    left = numbers >> half_bits
    right = numbers & low_mask
    for round_key in round_keys:
        hashed = _hashed(right + round_key)
        mixed = left ^ (hashed & low_mask)
        left = right
        right = mixed
    return (left << half_bits) | right


def _hashed(words: _Words) -> _Words:
    """SplitMix64's finalizer (Steele et al. 2014): every input bit affects every output bit."""
    words = words ^ (words >> np.uint64(30))
    words = words * np.uint64(0xBF58476D1CE4E5B9)
    words = words ^ (words >> np.uint64(27))
    words = words * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hash_numbers(*numbers: int) -> int:
    """A 64-bit hash of several numbers."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        increment = (number + 1) * _GOLDEN_RATIO & _MASK
        word = _hashed(word + np.uint64(increment))
    return int(word[0])
