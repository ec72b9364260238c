"""Owns numbered samples: sequences of a token stream, pictures, and mixtures of several sources. No torch here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.images import LabelledImages
from weft.data.mixture import Turns
from weft.data.order import Ints, mix, walk
from weft.data.packing import pack
from weft.data.tokens import TokenStream

HASH_DIGITS = 12
IGNORE = -100
"""Target that does not count; the same as of models.batch, which needs torch."""


@dataclass(frozen=True)
class Arrays:
    """Samples as a model takes them.

    Attributes:
        inputs: tokens_BS int64, or images_B1HW uint8.
        targets: targets_BS int64 (the token after each input; IGNORE where that is of another document), or classes_B int64.
        positions: positions_BS int64, from 0 in each sequence or document; zeros_B for images.
        documents: documents_BS int64; None: a sequence is one document.
    """

    inputs: NDArray[Any]
    targets: Ints
    positions: Ints
    documents: Ints | None = None


class Samples(Protocol):
    """An opened source: numbered samples, in which order they come, and what to tell of them."""

    @property
    def num_samples(self) -> int:
        """How many there are."""

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Numbers of the samples at these places of a run, from its beginning; a pure function."""

    def read(self, samples: Ints) -> Arrays:
        """The samples with these numbers; [any shape] counts as flat."""

    def facts(self) -> dict[str, object]:
        """What the `data` of the run event says."""


@dataclass(frozen=True)
class Sequences:
    """Sample i is tokens [i * S, (i + 1) * S] of a stream: S inputs, and S targets shifted by one."""

    stream: TokenStream
    seq_len: int
    source: str
    packing: Literal["stream", "documents"] = "stream"

    @property
    def num_samples(self) -> int:
        """Whole sequences in the stream, each with the token after it."""
        return (len(self.stream) - 1) // self.seq_len

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Epoch after epoch, each in its own order."""
        return walk(places, self.num_samples, seed=seed)

    def read(self, samples: Ints) -> Arrays:
        """Sequences of tokens with their targets; [any shape] counts as flat."""
        length, starts = self.seq_len, (samples.ravel() * self.seq_len).tolist()
        tokens = np.stack([self.stream.read(start, start + length + 1) for start in starts])
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # of one row both would be one memory
        if self.packing == "stream":
            return Arrays(inputs, targets, np.tile(np.arange(length, dtype=np.int64), (len(tokens), 1)))
        packed = [pack(self.stream.document_bounds, start, length) for start in starts]
        targets[np.stack([window.leaves for window in packed])] = IGNORE
        positions = np.stack([window.positions for window in packed])
        return Arrays(inputs, targets, positions, np.stack([window.documents for window in packed]))

    def facts(self) -> dict[str, object]:
        """Source, files, bytes, tokens, documents where they are known, sequences, hash."""
        stream = self.stream
        documents = {} if stream.documents is None else {"documents": len(stream.documents) - 1}
        sizes = {"files": len(stream.files), "bytes": stream.num_bytes, "tokens": len(stream)}
        samples = {"samples": self.num_samples, "sha256": stream.sha256[:HASH_DIGITS]}
        return {"source": self.source, **sizes, **documents, **samples}


@dataclass(frozen=True)
class Pictures:
    """Sample i is image i."""

    pairs: LabelledImages
    source: str

    @property
    def num_samples(self) -> int:
        """Number of images."""
        return len(self.pairs)

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Epoch after epoch, each in its own order."""
        return walk(places, self.num_samples, seed=seed)

    def read(self, samples: Ints) -> Arrays:
        """Images with their classes; [any shape] counts as flat."""
        labels = self.pairs.labels[samples.ravel()].astype(np.int64)
        return Arrays(self.pairs.images[samples.ravel()], labels, np.zeros_like(labels))

    def facts(self) -> dict[str, object]:
        """Source, bytes, images, hash."""
        pairs = self.pairs
        sizes = {"bytes": pairs.num_bytes, "samples": len(pairs)}
        return {"source": self.source, **sizes, "sha256": pairs.sha256[:HASH_DIGITS]}


@dataclass(frozen=True)
class Mixture:
    """Several sources: the samples of the first one, then those of the second, and so on; drawn by `turns`."""

    parts: tuple[Samples, ...]
    turns: Turns

    @cached_property
    def bounds(self) -> Ints:
        """Number of every part's first sample, and of all."""
        return np.cumsum([0, *(part.num_samples for part in self.parts)], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """Samples of all parts."""
        return int(self.bounds[-1])

    def at(self, places: Ints, *, seed: int) -> Ints:
        """By turns; each part walks through its own epochs."""
        sources, own = self.turns.at(places)
        samples = np.empty(len(places), dtype=np.int64)
        for number, part in enumerate(self.parts):
            chosen = sources == number
            samples[chosen] = self.bounds[number] + part.at(own[chosen], seed=mix(seed, number))
        return samples

    def read(self, samples: Ints) -> Arrays:
        """The samples with these numbers, in their order; [any shape] counts as flat."""
        flat = samples.ravel()
        sources = np.searchsorted(self.bounds, flat, side="right") - 1
        present = np.unique(sources).tolist()
        order = np.concatenate([np.flatnonzero(sources == number) for number in present])
        read = [self.parts[number].read(flat[sources == number] - self.bounds[number]) for number in present]
        back = np.argsort(order)
        names = [name for name, array in vars(read[0]).items() if array is not None]
        return Arrays(**{name: np.concatenate([getattr(arrays, name) for arrays in read])[back] for name in names})

    def facts(self) -> dict[str, object]:
        """Sources with their exact shares, sums of their sizes, a hash of their hashes."""
        facts = [part.facts() for part in self.parts]
        shares = {str(own["source"]): share for own, share in zip(facts, self.turns.shares, strict=True)}
        summed = [key for key in ("bytes", "tokens", "samples") if key in facts[0]]
        sizes: dict[str, object] = {key: sum(int(str(own[key])) for own in facts) for key in summed}
        digest = hashlib.sha256("".join(str(own["sha256"]) for own in facts).encode()).hexdigest()
        words = ", ".join(f"{share:.1%} {source}" for source, share in shares.items())
        return {"source": words, **sizes, "sha256": digest[:HASH_DIGITS], "shares": shares}
