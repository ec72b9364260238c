"""Owns what a run reads: a source opened for a model, and its samples as arrays. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core.checks import Check
from weft.core.config import Data, Run
from weft.core.model import ModelConfig
from weft.errors import DataError, Fault
from weft.train import images
from weft.train.files import KEY, find_files
from weft.train.images import LabelledImages
from weft.train.order import Ints, layout_of, samples_of_step
from weft.train.tokens import TokenStream, names, open_stream

__all__ = ["CHECKS", "Arrays", "Samples", "layout_of", "open_data", "samples_of_step"]

HASH_DIGITS = 12


@dataclass(frozen=True)
class Arrays:
    """Samples as a model takes them.

    Attributes:
        inputs: tokens_BS int64, or images_B1HW uint8.
        targets: targets_BS int64 (the token after each input), or classes_B int64.
        positions: positions_BS int64, from 0; zeros_B for images.
    """

    inputs: NDArray[Any]
    targets: Ints
    positions: Ints


class Samples(Protocol):
    """An opened source: numbered samples, and what to tell of them."""

    @property
    def num_samples(self) -> int:
        """How many there are."""

    def read(self, samples: Ints) -> Arrays:
        """The samples with these numbers; [any shape] counts as flat."""

    def facts(self) -> dict[str, object]:
        """What the `data` event says."""


@dataclass(frozen=True)
class Sequences:
    """Sample i is tokens [i * S, (i + 1) * S] of a stream: S inputs, and S targets shifted by one."""

    stream: TokenStream
    seq_len: int
    source: str

    @property
    def num_samples(self) -> int:
        """Whole sequences in the stream, each with the token after it."""
        return (len(self.stream) - 1) // self.seq_len

    def read(self, samples: Ints) -> Arrays:
        """Sequences of tokens with their targets; [any shape] counts as flat."""
        length = self.seq_len
        tokens = np.stack([self.stream.read(i * length, (i + 1) * length + 1) for i in samples.ravel().tolist()])
        positions = np.tile(np.arange(length, dtype=np.int64), (len(tokens), 1))
        return Arrays(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), positions)

    def facts(self) -> dict[str, object]:
        """Source, files, bytes, tokens, sequences, hash."""
        stream = self.stream
        sizes = {
            "files": len(stream.files),
            "bytes": stream.num_bytes,
            "tokens": len(stream),
            "samples": self.num_samples,
        }
        return {"source": self.source, **sizes, "sha256": stream.sha256[:HASH_DIGITS]}


@dataclass(frozen=True)
class Pictures:
    """Sample i is image i."""

    pairs: LabelledImages
    source: str

    @property
    def num_samples(self) -> int:
        """Number of images."""
        return len(self.pairs)

    def read(self, samples: Ints) -> Arrays:
        """Images with their classes; [any shape] counts as flat."""
        labels = self.pairs.labels[samples.ravel()].astype(np.int64)
        return Arrays(self.pairs.images[samples.ravel()], labels, np.zeros_like(labels))

    def facts(self) -> dict[str, object]:
        """Source, bytes, images, hash."""
        pairs = self.pairs
        sizes = {"bytes": pairs.num_bytes, "samples": len(pairs)}
        return {"source": self.source, **sizes, "sha256": pairs.sha256[:HASH_DIGITS]}


def open_data(data: Data, model: ModelConfig) -> Samples:
    """The source of `data`, checked against the model that shall read it.

    Raises:
        DataError: missing, empty, too short, broken, or beyond the model's vocabulary, image size or classes.
    """
    return _open_images(data, model) if model.kind == "images" else _open_tokens(data, model)


def _open_tokens(data: Data, model: ModelConfig) -> Sequences:
    if data.source == "digits":
        raise DataError(Fault(KEY, "'digits' are images, the model reads tokens", fix="--model.name mnist"))
    files = find_files(data.source)
    stream = open_stream(files, token_dtype=data.token_dtype, vocab=model.axis_sizes()["vocab"])
    if len(stream) <= data.seq_len:
        need = f"at least {data.seq_len + 1} = data.seq_len + 1"
        fix = f"--data.seq_len {len(stream) - 1}, or a longer source" if len(stream) > 1 else "a longer source"
        raise DataError(Fault(KEY, f"{names(files)} is too short", f"{len(stream)} tokens", need, fix))
    return Sequences(stream, data.seq_len, data.source)


def _open_images(data: Data, model: ModelConfig) -> Pictures:
    if data.source == "stdlib":
        raise DataError(Fault(KEY, "'stdlib' is text, the model reads images", fix="--data.source digits"))
    pairs = images.digits() if data.source == "digits" else images.read_pair(data.source)
    sizes = model.model_dump()
    pairs.check(image_size=sizes["image_size"], classes=sizes["classes"])
    return Pictures(pairs, data.source)


def source_faults(run: Run) -> Iterable[Fault]:
    """What is wrong with the source; the digits, a second to load, are only looked for."""
    try:
        if (run.data.source, run.model.kind) == ("digits", "images"):
            images.check_digits()
        else:
            open_data(run.data, run.model)
    except DataError as error:
        return error.faults
    return ()


CHECKS = (Check((KEY, "data.token_dtype", "model"), source_faults),)
