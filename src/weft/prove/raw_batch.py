"""Whole batches from raw samples: targets, masks, positions and documents by their definitions, token by token.

Independent of the code that feeds ranks (`weft.train.data_loader`, `weft.data.packing`,
`with_later_targets`), so that a fault there is on one side of a proof only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.arrays import ArraySamples
from weft.data.conversations import ConversationSamples
from weft.data.order import DRAW_KEY, Ints
from weft.data.samples import SampleArrays, Samples, SequenceSamples, num_evaluated
from weft.models.common.batch import IGNORE, Batch, array_batch
from weft.prove.raw_rows import rows_of

GOLDEN_RATIO = 0x9E3779B97F4A7C15


def is_masked(sample: int, column: int) -> bool:
    """Whether a proof masks this target: one of eight, and half of every other sample, so that
    sequences and micro-batches have different numbers of targets.
    """
    if sample % 2 and column % 2:
        return True
    return (sample * 7 + column * 3) % 8 == 0


@dataclass(frozen=True)
class FirstSamples:
    """The first samples of others: those of an evaluation, whose last batch is not full."""

    samples: Samples
    num_samples: int

    @staticmethod
    def of(samples: Samples, *, global_size: int) -> FirstSamples:
        """A batch and a half; fewer where there are fewer, or a batch is one sample."""
        number = global_size + max(global_size // 2, 1)
        return FirstSamples(samples, min(number, samples.num_samples))

    def at(self, places: Ints, *, seed: int) -> Ints:
        """The order of the samples themselves."""
        return self.samples.at(places, seed=seed)

    def read(self, samples: Ints) -> SampleArrays:
        """Samples by number."""
        return self.samples.read(samples)

    def place(self, sample: int) -> dict[str, object]:
        """Where a sample is."""
        return self.samples.place(sample)

    def facts(self) -> dict[str, object]:
        """Facts of the samples themselves."""
        return self.samples.facts()


@dataclass(frozen=True)
class MaskedSamples:
    """Samples of which some targets do not count, as in fine-tuning data: see `is_masked`."""

    samples: Samples

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.samples.num_samples

    def at(self, places: Ints, *, seed: int) -> Ints:
        """The order of the samples themselves."""
        return self.samples.at(places, seed=seed)

    def read(self, samples: Ints) -> SampleArrays:
        """The samples with masked targets."""
        arrays = self.samples.read(samples)
        mask_targets(arrays.targets, samples.ravel())
        return arrays

    def place(self, sample: int) -> dict[str, object]:
        """Where a sample is."""
        return self.samples.place(sample)

    def facts(self) -> dict[str, object]:
        """Facts of the samples themselves."""
        return self.samples.facts()


def mask_targets(targets_BS: Ints | Tensor, samples_B: Ints) -> None:
    """Mask targets in place."""
    length = targets_BS.shape[1]
    for row, sample in enumerate(samples_B.tolist()):
        for column in range(length):
            if is_masked(sample, column):
                targets_BS[row, column] = IGNORE


@dataclass
class _Sequence:
    """One sequence, token by token."""

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)


def samples_of_step(samples: Samples, step: int, *, global_size: int, seed: int) -> Ints:
    """The samples of step `step` (from 0) over all ranks, in their order."""
    first = step * global_size
    places = np.arange(first, first + global_size, dtype=np.int64)
    return samples.at(places, seed=seed)


def with_draw_keys(batch: Batch, places: Iterable[int], *, seed: int) -> Batch:
    """The batch with keys of random numbers: of each sequence, by its place in the order of the run."""
    key = _mixed((seed + 1) * GOLDEN_RATIO)
    key = _mixed(key + (DRAW_KEY + 1) * GOLDEN_RATIO)
    words = [_mixed(_mixed((place + 1) * GOLDEN_RATIO) + key) for place in places]
    keys = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words])
    return replace(batch, draw_keys=keys.to(batch.inputs.device))


def _mixed(word: int) -> int:
    """SplitMix64's finalizer, of the lowest 64 bits."""
    word %= 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def evaluated_samples(samples: Samples, global_size: int) -> list[Ints]:
    """The samples of an evaluation, in their order: see `FirstSamples`."""
    first = FirstSamples.of(samples, global_size=global_size)
    number = num_evaluated(first, global_size)
    found = []
    for start in range(0, number, global_size):
        end = min(start + global_size, number)
        found.append(np.arange(start, end))
    return found


def batch_of(samples: Samples, numbers: Ints, *, later: bool) -> Batch:
    """The batch of these samples, with whole sequences."""
    raw = samples.samples if isinstance(samples, MaskedSamples) else samples
    if isinstance(raw, ConversationSamples):
        rows = rows_of(raw, numbers.ravel().tolist())
        return _with_later(rows) if later and not raw.has_pairs else rows
    if isinstance(raw, ArraySamples):
        arrays = raw.rows(numbers.ravel())
        return array_batch({name: torch.from_numpy(array) for name, array in arrays.items()})
    if not isinstance(raw, SequenceSamples):
        return _batch_of_arrays(samples.read(numbers), later=later)
    sequences = [_sequence(raw, number) for number in numbers.tolist()]
    targets = _tensor([each.targets for each in sequences])
    if isinstance(samples, MaskedSamples):
        mask_targets(targets, numbers)
    documents = None
    if raw.packing == "documents":
        documents = _tensor([each.documents for each in sequences])
    batch = Batch(
        inputs=_tensor([each.inputs for each in sequences]),
        targets=targets,
        positions=_tensor([each.positions for each in sequences]),
        documents=documents,
    )
    return _with_later(batch) if later else batch


def _sequence(samples: SequenceSamples, number: int) -> _Sequence:
    """Sample `number`: tokens [number S, (number + 1) S) and the token after each."""
    length = samples.seq_len
    first = number * length
    after_last = first + length + 1
    tokens = samples.stream.read(first, after_last).tolist()
    document_starts: set[int] = set()
    if samples.packing == "documents":
        document_starts = _document_starts(samples, first, length)
    found = _Sequence()
    document = 0
    position = 0
    for column in range(length):
        if column in document_starts:
            document += 1
            position = 0
        is_last = column + 1 in document_starts
        target = IGNORE if is_last else tokens[column + 1]
        found.inputs.append(tokens[column])
        found.targets.append(target)
        found.positions.append(position)
        found.documents.append(document)
        position += 1
    return found


def _document_starts(samples: SequenceSamples, start: int, length: int) -> set[int]:
    """Columns of a window but its first, its end included, at which a document begins."""
    all_bounds = samples.stream.document_bounds
    bounds = all_bounds[0 : len(all_bounds)]
    is_inside = (bounds > start) & (bounds <= start + length)
    columns = bounds[is_inside] - start
    return set(columns.tolist())


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _batch_of_arrays(arrays: SampleArrays, *, later: bool) -> Batch:
    fields: dict[str, Any] = {}
    for name, found in vars(arrays).items():
        if isinstance(found, Mapping):  # the named arrays of a mixture
            fields[name] = {key: torch.from_numpy(array) for key, array in found.items()}
        elif found is not None:
            fields[name] = torch.from_numpy(found)
    batch = Batch(**fields)
    return _with_later(batch) if later else batch


def _with_later(batch: Batch) -> Batch:
    """With the token after each one, and the target after that: those of the next column, or of the
    target itself where the sequence or document ends.
    """
    next_rows = []
    later_rows = []
    num_rows, length = batch.inputs.shape
    for row in range(num_rows):
        inputs = batch.inputs[row].tolist()
        targets = batch.targets[row].tolist()
        documents = [0] * length
        if batch.documents is not None:
            documents = batch.documents[row].tolist()
        next_tokens = []
        later_targets = []
        for column in range(length):
            following = column + 1
            is_last = following == length or documents[column] != documents[following]
            if is_last:
                next_tokens.append(max(targets[column], 0))
                later_targets.append(IGNORE)
            else:
                next_tokens.append(inputs[following])
                later_targets.append(targets[following])
        next_rows.append(next_tokens)
        later_rows.append(later_targets)
    return Batch(
        batch.inputs,
        batch.targets,
        batch.positions,
        documents=batch.documents,
        next_inputs=_tensor(next_rows),
        later_targets=_tensor(later_rows),
    )
