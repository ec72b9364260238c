"""Numbered samples: sequences of a token stream, images, and weighted mixtures of several sources."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core.input_spec import TARGETS
from weft.data.document_bounds import sha256_of
from weft.data.images import LabelledImages
from weft.data.mixture import MixtureSampler
from weft.data.order import Ints, Order, epoch_order, hash_numbers
from weft.data.packing import pack
from weft.data.tokens import TokenStream, verified_part

HASH_DIGITS = 12
DOCUMENTS_SHA256 = "documents_sha256"
"""Fact of a text packed by documents: a hash of where they begin, which that of the tokens does not
hold.
"""
SUMMED_FACTS = (
    *("bytes", "tokens", "conversations", "pairs", "answers", "targets", "cut", "cut_tokens"),
    *("without_target", "shared_tokens", "samples"),
)
"""Facts of a mixture that are sums of those of its sources."""
NAMED_FACTS = ("packing", "format")
"""Facts of a mixture that are the different ones of its sources."""
IGNORE = -100
"""Target that does not count in the loss; equal to that of models.common.batch, which needs torch.
"""


@dataclass(frozen=True)
class SampleArrays:
    """Samples as model inputs.

    Attributes:
        inputs: tokens_BS int64, or images_B1HW uint8.
        targets: targets_BS int64 (the token after each input; IGNORE where that is in another
            document), or classes_B int64.
        positions: positions_BS int64, from 0 in each sequence or document; zeros_B for images.
        documents: documents_BS int64; None: a sequence is one document.
        pairs: bool_BS, one token of each preference pair; None: the data has no pairs.
        references: logprobs_BS float64, of the targets under the reference model.
        fields: the other arrays of a model that names its inputs, by name.
    """

    inputs: NDArray[Any]
    targets: Ints
    positions: Ints
    documents: Ints | None = None
    pairs: NDArray[np.bool_] | None = None
    references: NDArray[np.float64] | None = None
    fields: Mapping[str, NDArray[Any]] | None = None


class Samples(Protocol):
    """An opened source: numbered samples and their order."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Numbers of the samples at these places of a run, counted from its beginning; a pure
        function.
        """

    def read(self, samples: Ints) -> SampleArrays:
        """The samples with these numbers, flattened to one batch dimension."""

    def place(self, sample: int) -> dict[str, object]:
        """Where a sample is: its number, its source, and its place in that source."""

    def facts(self) -> dict[str, object]:
        """The field `data` of the run event."""


ARRAYS = "arrays"
"""Fact of samples of named arrays: the type and shape of each."""


def num_evaluated(samples: Samples, global_size: int) -> int:
    """Samples of an evaluation: all of them; those of whole batches where a sample that does not count
    cannot fill the last one.
    """
    arrays = samples.facts().get(ARRAYS)
    if isinstance(arrays, Mapping) and TARGETS not in arrays:
        return samples.num_samples // global_size * global_size
    return samples.num_samples


@dataclass(frozen=True)
class SequenceSamples:
    """Sample i is tokens [i * S, (i + 1) * S] of a stream: S inputs, and S targets shifted by one."""

    stream: TokenStream
    seq_len: int
    source: str
    packing: Literal["stream", "documents"] = "stream"
    order: Order = "shuffled"

    @property
    def num_samples(self) -> int:
        """Whole sequences in the stream, each with the token after it."""
        return (len(self.stream) - 1) // self.seq_len

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Epoch after epoch, each in its own order."""
        return epoch_order(places, self.num_samples, seed=seed, order=self.order)

    def read(self, samples: Ints) -> SampleArrays:
        """Sequences of tokens with their targets, flattened to one batch dimension."""
        starts = (samples.ravel() * self.seq_len).tolist()
        windows: list[Ints] = []
        for start in starts:
            stop = start + self.seq_len + 1
            windows.append(self.stream.read(start, stop))
        tokens = np.stack(windows)
        inputs = tokens[:, :-1].copy()  # copies: inputs and targets must not share memory
        targets = tokens[:, 1:].copy()
        if self.packing == "stream":
            columns = np.arange(self.seq_len, dtype=np.int64)
            positions = np.tile(columns, (len(tokens), 1))
            return SampleArrays(inputs=inputs, targets=targets, positions=positions)
        packed = [pack(self.stream.document_bounds, start, self.seq_len) for start in starts]
        is_last = np.stack([window.is_last for window in packed])
        targets[is_last] = IGNORE
        return SampleArrays(
            inputs=inputs,
            targets=targets,
            positions=np.stack([window.positions for window in packed]),
            documents=np.stack([window.documents for window in packed]),
        )

    def place(self, sample: int) -> dict[str, object]:
        """Its tokens as [first, last + 1] of the source."""
        start = sample * self.seq_len
        stop = start + self.seq_len + 1
        return {"sample": sample, "source": self.source, "tokens": [start, stop]}

    def facts(self) -> dict[str, object]:
        """Source, files, bytes, tokens, documents where they are known, sequences, packing, hash; of a
        prepared folder, whose metadata state the hash, whether the start has verified it
        (`whole`) or checksums of samples.
        """
        stream = self.stream
        facts: dict[str, object] = {
            "source": self.source,
            "files": len(stream.files),
            "bytes": stream.num_bytes,
            "tokens": len(stream),
        }
        if stream.documents is not None:
            facts["documents"] = len(stream.documents) - 1
        facts["samples"] = self.num_samples
        facts["packing"] = self.packing
        if self.packing == "documents":
            facts[DOCUMENTS_SHA256] = sha256_of(stream.document_bounds)[:HASH_DIGITS]
        facts.update(stream.read_as_fact())
        facts["sha256"] = stream.sha256[:HASH_DIGITS]
        if stream.known_sha256 is not None:
            facts["verified"] = verified_part(stream.num_bytes)
        return facts


@dataclass(frozen=True)
class ImageSamples:
    """Sample i is image i."""

    pairs: LabelledImages
    source: str
    order: Order = "shuffled"

    @property
    def num_samples(self) -> int:
        """Number of images."""
        return len(self.pairs)

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Epoch after epoch, each in its own order."""
        return epoch_order(places, self.num_samples, seed=seed, order=self.order)

    def read(self, samples: Ints) -> SampleArrays:
        """Images with their classes, flattened to one batch dimension."""
        numbers = samples.ravel()
        labels = self.pairs.labels[numbers].astype(np.int64)
        return SampleArrays(
            inputs=self.pairs.images[numbers], targets=labels, positions=np.zeros_like(labels)
        )

    def place(self, sample: int) -> dict[str, object]:
        """The sample's place among the images of the source."""
        return {"sample": sample, "source": self.source, "image": sample}

    def facts(self) -> dict[str, object]:
        """Source, bytes, images, hash."""
        return {
            "source": self.source,
            "bytes": self.pairs.num_bytes,
            "samples": len(self.pairs),
            "sha256": self.pairs.sha256[:HASH_DIGITS],
        }


@dataclass(frozen=True)
class MixtureSamples:
    """Several sources: the samples of the first one, then those of the second, and so on; chosen by
    `sampler`.
    """

    parts: tuple[Samples, ...]
    sampler: MixtureSampler

    @cached_property
    def bounds(self) -> Ints:
        """Number of every part's first sample, and the total."""
        counts = [part.num_samples for part in self.parts]
        return np.cumsum([0, *counts], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """Samples of all parts."""
        return int(self.bounds[-1])

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Samples in the order of the mixture; each part has its own epochs."""
        sources, own_places = self.sampler.at(places)
        samples = np.empty(len(places), dtype=np.int64)
        for number, part in enumerate(self.parts):
            is_own = sources == number
            # sources of equal size would otherwise be read in the same order
            own_seed = hash_numbers(seed, number)
            own_samples = part.at(own_places[is_own], seed=own_seed)
            samples[is_own] = self.bounds[number] + own_samples
        return samples

    def read(self, samples: Ints) -> SampleArrays:
        """The samples with these numbers, in their order, flattened to one batch dimension."""
        numbers = samples.ravel()
        sources = np.searchsorted(self.bounds, numbers, side="right") - 1
        indices = []
        arrays = []
        for source in np.unique(sources).tolist():
            (own_indices,) = np.nonzero(sources == source)
            own_numbers = numbers[own_indices] - self.bounds[source]
            own_arrays = self.parts[source].read(own_numbers)
            indices.append(own_indices)
            arrays.append(own_arrays)
        # parts are read source by source, each in one piece, and put back into the order of the batch
        original_order = np.argsort(np.concatenate(indices))

        def join(values: list[NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate(values)[original_order]

        joined: dict[str, Any] = {}
        for name, value in vars(arrays[0]).items():
            values = [getattr(part, name) for part in arrays]
            if isinstance(value, Mapping):
                joined[name] = {key: join([each[key] for each in values]) for key in value}
            elif value is not None:
                joined[name] = join(values)
        return SampleArrays(**joined)

    def place(self, sample: int) -> dict[str, object]:
        """Its place in the source that it is of."""
        part = int(np.searchsorted(self.bounds, sample, side="right")) - 1
        first = int(self.bounds[part])
        place = dict(self.parts[part].place(sample - first))
        place["sample"] = sample
        return place

    def facts(self) -> dict[str, object]:
        """Sources with their exact shares, sums of their sizes, a hash of their hashes, and places in
        a cycle in the order of the sources, which may be moved.
        """
        facts = [part.facts() for part in self.parts]
        shares: dict[str, float] = {}
        summary: list[str] = []
        hashes = document_hashes = ""
        for own, share in zip(facts, self.sampler.shares, strict=True):
            source = str(own["source"])
            shares[source] = share
            summary.append(f"{share:.1%} {source}")
            hashes += str(own["sha256"])
            document_hashes += str(own.get(DOCUMENTS_SHA256, ""))
        merged: dict[str, object] = {"source": ", ".join(summary)}
        for key in SUMMED_FACTS:
            numbers = [int(str(own[key])) for own in facts if key in own]
            if numbers:
                merged[key] = sum(numbers)
        for key in NAMED_FACTS:
            names = {str(own[key]) for own in facts if key in own}
            if names:
                merged[key] = ", ".join(sorted(names))
        read_as = [f"{own['source']}: {own['read_as']}" for own in facts if "read_as" in own]
        if read_as:
            merged["read_as"] = "; ".join(read_as)
        merged["sha256"] = _short_hash(hashes)
        if document_hashes:
            merged[DOCUMENTS_SHA256] = _short_hash(document_hashes)
        merged["shares"] = shares
        merged["weights"] = list(self.sampler.counts)
        return merged


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
